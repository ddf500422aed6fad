"""What a model makes of messages, and of the ids of its answers."""
