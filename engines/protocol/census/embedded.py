"""What the embedded engine has of its weights."""

from __future__ import annotations

from engines.protocol.census.entries import Cache, Census, Sign, Treatment

CENSUS = Census(
    versions=("0.1",),
    caches=(
        Cache(
            name="prefix cache and KV blocks",
            treatment=Treatment.CLEARED,
            by="/flush_cache, before a release and with the last bucket of a push",
            source="generation/batcher.py: flush",
            options=("max_total_tokens",),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="LoRA adapters",
            treatment=Treatment.NAMED,
            by="a salt in the tokens of cached prefixes, which is new with each load",
            source="weights/lora_adapters.py: salted",
            options=("*lora*",),
        ),
        Cache(
            name="routed-expert records",
            treatment=Treatment.RECOMPUTED,
            by="a request for them takes no prefix from the cache",
            source="generation/kv_cache.py: search_prefix_match",
        ),
    ),
)
