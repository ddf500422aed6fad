"""The calls of one server, by what they are about: its phases, engines, checks and samples.

The same classes work for a server in this process and for an actor; only the ``Caller`` differs.
"""
