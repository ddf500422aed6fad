"""The page of a server: live view, data and metrics."""
