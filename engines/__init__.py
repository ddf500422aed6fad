"""Inference engines and the one HTTP protocol they are driven by.

Importing this package starts nothing and needs neither torch nor ray.  ``rollout`` imports
``engines``; the reverse never happens.
"""
