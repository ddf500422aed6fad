"""Real SGLang on a machine without a GPU: an installer and a server, for tests and for laptops.

SGLang is not a dependency of this package: it lives in an environment of its own in the user's
cache folder, made as in ``recipe.py`` from ``pins.txt`` and ``shims/``.  What the shims stand
in for is in ``shims/README.md``.
"""
