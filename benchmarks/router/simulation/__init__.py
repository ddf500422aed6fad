"""Routing policies in a simulation: engines with a KV budget, sessions of recorded agents."""
