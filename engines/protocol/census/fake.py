"""What a fake engine has of its weights: one entry for each treatment, with the flaws of SGLang."""

from __future__ import annotations

from engines.protocol.census.entries import Cache, Census, Sign, Treatment

_STATE = "engine/fake_caches.py"
VARIABLE = "FAKE_EMBEDDING_CACHE_MB"

CENSUS = Census(
    versions=("0.5.23",),
    caches=(
        Cache(
            name="prefix cache",
            treatment=Treatment.CLEARED,
            by="/flush_cache, before a release and with the last bucket of a push",
            source=f"{_STATE}: flush",
            options=("prefix_cache",),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="storage tier",
            treatment=Treatment.NAMED,
            by="extra_key, which is a part of its keys",
            source=f"{_STATE}: _keep",
            options=("storage_cache",),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="embeddings of images",
            treatment=Treatment.DISABLED,
            by="embeddings of images would outlive a push that changes what computes them",
            source=f"{_STATE}: _embedding",
            options=("image_cache",),
            variable=VARIABLE,
            is_of_encoder=True,
            sign=Sign.IMAGE,
        ),
        Cache(
            name="store of embeddings that engines share",
            treatment=Treatment.REFUSED,
            by="embeddings of images would outlive a push that changes what computes them",
            source=f"{_STATE}: _embedding",
            options=("shared_image_store",),
            is_of_encoder=True,
            sign=Sign.IMAGE,
        ),
        Cache(
            name="copies of weights",
            treatment=Treatment.RECOMPUTED,
            by="the end of each update",
            source=f"{_STATE}: copy",
            options=("weight_copies",),
            sign=Sign.COPY,
        ),
    ),
)
