"""Recovery of one server: health of its engines, and restarts."""
