"""Payloads of pushes: pickles, by value or by handle, read as values; and encoded tensors."""
