"""A push of new weights, and the buffers that carry it."""
