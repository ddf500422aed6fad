"""The engine behind its HTTP API."""
