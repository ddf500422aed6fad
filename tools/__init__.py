"""What is used from a clone, and is not in the wheel."""
