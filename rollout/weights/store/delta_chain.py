"""The deltas from the version that the nodes keep to the one that is written.

Always true: each begins from the version before it; together they have at most half of the model's
bytes, else none is kept and the next write sends whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout.weights.format.encoding import EncodedPush
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.store.node.rebuilt import joined

_MOST_OF_MODEL = 0.5


@dataclass(frozen=True, slots=True)
class DeltaChain:
    """Deltas of consecutive pushes.

    Attributes:
        links: the version that each leads to, with its deltas; the oldest first.
    """

    links: tuple[tuple[int, EncodedPush], ...] = ()

    def then(self, push: WeightPush) -> DeltaChain:
        """The chain with the deltas of a later push; a push without deltas ends the chain."""
        if push.encoded is None:
            return DeltaChain()
        links = (
            *(self.links if self._end == push.encoded.base else ()),
            (push.version, push.encoded),
        )
        num_bytes = sum(len(delta or b"") for _, link in links for delta in link.tensors.values())
        model_bytes = sum(spec.num_bytes for spec in push.manifest.tensors.values())
        return DeltaChain(links if num_bytes <= _MOST_OF_MODEL * model_bytes else ())

    def since(self, version: int) -> DeltaChain:
        """The part after this version; without links if no link begins from it."""
        links = tuple(link for link in self.links if link[0] > version)
        return DeltaChain(links if links and links[0][1].base == version else ())

    def after(self, version: int) -> Callable[[str], bytes | None] | None:
        """See ``Coordinator.write``."""
        chain = self.since(version)
        return chain._changes_of if chain.links else None

    def _changes_of(self, tensor: str) -> bytes | None:
        """The deltas of a tensor, for ``rebuild``, or None if it is sent whole."""
        deltas = []
        for _, link in self.links:
            if (delta := link.tensors.get(tensor, b"")) is None:
                return None
            deltas += [delta] if delta else []
        return joined(deltas)

    @property
    def _end(self) -> int | None:
        return self.links[-1][0] if self.links else None
