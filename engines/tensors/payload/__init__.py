"""Payloads of pushes by value or by handle: pickles, read as values."""
