"""The driver: how busy it keeps engines, and what it costs."""
