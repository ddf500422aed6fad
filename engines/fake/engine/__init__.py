"""The fake engine itself: its state, its calls and their faults."""
