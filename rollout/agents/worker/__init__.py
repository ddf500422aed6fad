"""One worker: its HTTP application, its life and its settings."""
