"""Readers of bytes that others wrote, and what has to be true of each whatever it is given."""
