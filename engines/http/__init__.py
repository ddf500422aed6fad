"""The HTTP client of an engine: connections, calls with deadlines, endpoints; chat templates."""
