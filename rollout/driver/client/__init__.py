"""One sample from request to reply: the connection, retries, the number in flight, sessions."""
