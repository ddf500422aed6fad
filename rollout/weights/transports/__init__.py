"""How the buckets of a push reach an engine: one carrier per way, all behind ``Carrier``.

by value (``update_weights_from_tensor``), by path (tmpfs or a shared disk), by broadcast (gloo,
NCCL), as a LoRA adapter.  Another way (checkpoint-engine, NIXL, Mooncake ...) is a class of its
own with these methods, given to ``make_push`` or put in a ``WeightPush``.
"""
