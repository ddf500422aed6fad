"""The HTTP client of an engine: connections, calls with deadlines, SGLang's endpoints."""
