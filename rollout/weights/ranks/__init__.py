"""A push by every rank of a trainer.

Rank 0 decides, all ranks gather together, and each sends its own part.  ``rank_protocol`` has the
messages that they exchange, and what is always true.
"""
