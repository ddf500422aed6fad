"""Weights on their way and in store; one file per family, each with ``measure``."""
