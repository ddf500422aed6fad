"""Tensors as bytes: copied in bulk, mapped from files, laid out as one bucket, fingerprinted."""
