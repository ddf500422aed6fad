"""Agents over the network, and the transfer of units between nodes."""
