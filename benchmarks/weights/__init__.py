"""Weights: pushes and the store; one file per family, each with ``measure``."""
