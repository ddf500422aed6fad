"""How the buckets of a push reach an engine.

For another transport (checkpoint-engine, NIXL ...) derive a class from ``Carrier`` and put it in a
``WeightPush``.
"""
