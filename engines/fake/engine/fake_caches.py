"""What a fake engine has of its weights after a request; nothing unless its options add it.

Always true: what is not cleared, named, off or derived again goes on as old weights computed it,
and the log-probs of prompts show that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from engines.fake.engine.fake_weights import FakeWeights, digest_of, logprob_of
from engines.protocol import PromptImage
from engines.protocol.old_state import FAKE
from engines.protocol.spec import EngineSpec, normalized

CACHES = {
    "prefix cache": "prefix_cache",
    "storage tier": "storage_cache",
    "embeddings of images": "image_cache",
    "store of embeddings that engines share": "shared_image_store",
    "copies of weights": "weight_copies",
}
"""What a fake may keep of old weights -> the option that adds it."""
PAGE = 16
"""Tokens of a prompt that are cached together."""
STORES: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
"""Storage tiers by name: they outlive engines and runs, and engines share them."""


class FakeCaches:
    """The caches of one engine.

    Args:
        prefix_cache: it has one, which a flush empties.
        storage_cache: name of its storage tier, or empty for none.
        image_cache: it has embeddings of images, unless its environment switches them off.
        shared_image_store: name of a store of embeddings, or empty for none.
        weight_copies: it computes with copies of its weights, made at the end of an update.

    Attributes:
        forgets: of ``CACHES``, those that keep old state whatever is called, for tests; ``names``
            if keys of prefixes have none.
    """

    def __init__(
        self,
        *,
        prefix_cache: bool = False,
        storage_cache: str = "",
        image_cache: bool = False,
        shared_image_store: str = "",
        weight_copies: bool = False,
    ) -> None:
        self.forgets: set[str] = set()
        self.shared_image_store = shared_image_store
        self._prefixes: dict[Any, tuple[str, str]] | None = {} if prefix_cache else None
        self._storage = STORES[storage_cache] if storage_cache else None
        self._embeddings: dict[Any, str] | None = {} if image_cache else None
        if shared_image_store:
            self._embeddings = STORES[shared_image_store]
        self._copy = ""
        self._has_copies = weight_copies

    def flush(self) -> None:
        """Empty what ``/flush_cache`` empties: not the storage tier, and not the embeddings."""
        if self._prefixes is not None and "prefix cache" not in self.forgets:
            self._prefixes.clear()

    def copy(self, weights: FakeWeights) -> None:
        """Derive copies of the weights, at the end of an update."""
        if self._has_copies and not (self._copy and "copies of weights" in self.forgets):
            self._copy = weights.checksum()

    def logprobs(
        self,
        weights: FakeWeights,
        prompt: Sequence[int],
        start: int,
        *,
        adapter: str = "",
        key: str = "",
        image: PromptImage | None = None,
    ) -> tuple[tuple[float, ...], int]:
        """Log-probs of the tokens after the one at ``start``; how many tokens were cached.

        Args:
            adapter: contents of the adapter.
            key: separates cached prefixes from those with another key.
        """
        if self._has_copies and not self._copy:
            self.copy(weights)
        state = f"{self._copy or weights.checksum()} {adapter}"
        if image is not None:
            state = digest_of((state, self._embedding(weights, image)))
        named = "" if "names" in self.forgets else key
        place = (named, adapter, image and image.digest)
        num_cached, cached = self._longest(place, prompt[:start])
        found = []
        for num, token in enumerate(prompt, start=1):
            state = cached if num == num_cached else digest_of((state, token))
            if num % PAGE == 0:
                self._keep((*place, tuple(prompt[:num])), state, weights)
            found.append(logprob_of(state))
        return tuple(found[start + 1 :]), num_cached

    def _longest(self, place: tuple[Any, ...], prefix: Sequence[int]) -> tuple[int, str]:
        """Tokens of the longest cached prefix, and the state after them."""
        for num in range(len(prefix) // PAGE * PAGE, 0, -PAGE):
            for tier in (self._prefixes, self._storage):
                if tier is not None and (found := tier.get((*place, tuple(prefix[:num])))):
                    return num, found[0]
        return 0, ""

    def _keep(self, place: tuple[Any, ...], state: str, weights: FakeWeights) -> None:
        for tier in (self._prefixes, self._storage):
            if tier is not None:
                tier.setdefault(place, (state, weights.checksum()))

    def has_old_prefixes(self, weights: FakeWeights) -> bool:
        """Whether its prefix cache has what other weights computed."""
        return any(made_of != weights.checksum() for _, made_of in (self._prefixes or {}).values())

    def _embedding(self, weights: FakeWeights, image: PromptImage) -> str:
        """What the tower computes of an image; by the image's name alone where it is cached."""
        tower = sorted(
            digest for digest in weights.digests.items() if digest[0].startswith("visual.")
        )
        computed = digest_of((image.data, tower))
        if self._embeddings is None:
            return computed
        return self._embeddings.setdefault(image.digest, computed)


def caches_of(spec: EngineSpec) -> FakeCaches:
    """The caches that a spec's options add, as far as its environment leaves them on."""
    env = FAKE.variables(keeps_embeddings=spec.keeps_embeddings) | dict(spec.env)
    return caches_with(normalized(spec.options), env)


def caches_with(options: Mapping[str, Any], env: Mapping[str, str]) -> FakeCaches:
    """The caches that options add, as far as this environment leaves them on."""
    return FakeCaches(
        prefix_cache=bool(options.get("prefix_cache")),
        storage_cache=str(options.get("storage_cache") or ""),
        image_cache=bool(options.get("image_cache")) and env.get(FAKE.embeddings_variable) != "0",
        shared_image_store=str(options.get("shared_image_store") or ""),
        weight_copies=bool(options.get("weight_copies")),
    )
