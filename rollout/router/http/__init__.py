"""HTTP messages and the connections to engines."""
