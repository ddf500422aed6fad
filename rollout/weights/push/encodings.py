"""The encodings of a push, one row each.  What each is made with is loaded when a push begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rollout.config import EncodingChoice, Transport
from rollout.weights.format.encoding import BegunPush, EncodingTerms
from rollout.weights.routes.rank_end import Encoder, Encoding

if TYPE_CHECKING:
    from rollout.weights.tensors.delta_base import DeltaBase

# Of all elements, by value: of more, a delta is not much smaller than whole tensors.
_MOST_CHANGED = 0.3


class DeltaEncoding:
    """The elements that have changed since the version that an engine holds.

    Attributes:
        copies: of what the engines hold, or None before the first push.
    """

    name = EncodingChoice.DELTA.value

    def __init__(self) -> None:
        self.copies: DeltaBase | None = None

    def goes(self, transport: str, version: int | None, terms: EncodingTerms) -> bool | str:
        """See ``Encoding``: to an engine that holds what this rank has copies of."""
        if transport == Transport.SHARED_MEMORY and terms.num_ranks > 1:
            return "its files are written by several ranks, and only rank 0 keeps copies"
        density = None if self.copies is None else self.copies.density
        if terms.wanted == EncodingChoice.AUTO:
            if transport == Transport.SHARED_MEMORY:
                # Measured in ``benchmarks.weights``, family ``delta``: a third of the speed.
                return "to compare the tensors takes longer than to copy them on one host"
            if (density or 0.0) > _MOST_CHANGED:
                return f"the last push changed {density:.1%} of the elements"
        return version is not None and self.copies is not None and self.copies.version == version

    def begin(self, push: BegunPush | None) -> Encoder | None:
        """See ``Encoding``."""
        if push is None:
            if self.copies is not None:
                self.copies.drop()
            return None
        from rollout.weights.tensors.delta_base import DeltaBase, DeltaEncoder

        self.copies = self.copies or DeltaBase()
        return DeltaEncoder(self.copies, push)


ENCODINGS: dict[str, Callable[[], Encoding]] = {DeltaEncoding.name: DeltaEncoding}
"""The best first: an engine gets the first that it applies, or whole tensors."""
