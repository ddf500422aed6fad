"""Settings and errors of the embedded engine."""
