"""Real vLLM on a machine without a GPU: an installer and its options, for tests and for laptops.

vLLM is not a dependency of this package: it lives in an environment of its own in the user's cache
folder, made as in ``recipe.py`` from ``pins.txt`` and ``shims/``.  When it runs, ``on_path/`` is
on its path.
"""
