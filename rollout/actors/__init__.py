"""Ray as a shell: the only package that imports ray.

Shells hold a plain object each and forward to it; handles offer the same methods from outside;
``launch`` makes and places them.  No decision is taken here.
"""
