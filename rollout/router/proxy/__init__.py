"""The way of one request from its client to an engine and back."""
