"""The tokens of a request so far, over several engines (pure)."""
