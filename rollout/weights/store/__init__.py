"""The current policy in spare DRAM: it survives engine and trainer, and is proved before use.

Read in this order: units, spread and layout (what goes where), records and commit (what is valid),
slots (one node's files), writer and fetching (bytes in and out), agent (one node's door), store.
"""
