"""Runs the parts as Ray actors: the only package that imports ray.

Actor classes extend the plain classes.  Handles offer the same methods to callers.  ``launch``
creates and places the actors.
"""
