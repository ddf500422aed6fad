"""Weights of engines: their format, pushes from the trainer, transports, and the DRAM store."""
