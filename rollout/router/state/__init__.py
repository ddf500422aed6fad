"""What outlives a router, for the one in its place."""
