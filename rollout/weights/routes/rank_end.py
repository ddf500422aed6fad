"""What a route and an encoding are in the ranks of the trainer, and a route's row with both ends.

Always true: only ``open`` imports a tensor library; what it returns frees all that a push holds
through it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rollout.config import ServerConfig
from rollout.weights.format.encoding import BegunPush, EncodedPush, EncodingTerms
from rollout.weights.routes.route import (
    Chosen,
    EnginePlace,
    Payload,
    PushTerms,
    RankPlace,
    Route,
)

if TYPE_CHECKING:
    from rollout.weights.format.manifest import TensorSpec
    from rollout.weights.routes.buffers import PushBuffers, ShmBufferPool
    from rollout.weights.tensors.payload import ExportSettings
    from rollout.weights.tensors.sources import Pairs

Places = Sequence[RankPlace]
"""Where each trainer rank runs."""
Shares = Mapping[int, Mapping[str, Any]]
"""Rank -> what it has made of a bucket for one route."""


@dataclass(frozen=True, slots=True)
class OwnGpu:
    """The GPU with the tensors of a rank, in one push.

    Attributes:
        settings: settings with which it allocates memory there that engines can open.
    """

    uuid: str
    settings: ExportSettings


@dataclass(frozen=True, slots=True)
class RankEnd:
    """What one rank's ends of the routes of a push are opened with.

    Attributes:
        writers: the ranks on this rank's host, the lowest first.
        gpu: None if its tensors are in host memory.
        buffers: buffers of shared memory.
        model: its tensors, by name, or empty if they are not known.
    """

    rank: int
    writers: Sequence[int]
    gpu: OwnGpu | None
    terms: PushTerms
    buffers: ShmBufferPool | PushBuffers
    config: ServerConfig
    model: Mapping[str, TensorSpec] = field(default_factory=dict)

    @property
    def own_host(self) -> int:
        return self.writers[0]


class ShareBuilder(Protocol):
    """One rank's end of a route in one push."""

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any] | None:
        """This rank's share of a bucket, as a message for rank 0, or None if it has none.

        ``fingerprints`` in it are of the tensors, if it took them.
        """
        ...

    def close(self) -> None:
        """Free what the push holds, in any state."""
        ...


def no_payload(chosen: Chosen, shares: Shares, ranks: Places, pairs: Pairs) -> Sequence[Payload]:
    """For a route whose engines get nothing with a bucket, but before or after it."""
    return ()


@dataclass(frozen=True, slots=True)
class RouteRow:
    """One route, in the order of ``choice.ROUTES``.

    Attributes:
        reach: how it reaches an engine from these ranks, or why it does not.
        route: the end where the engines are called.
        open: this rank's end, or None if it has no part in it; it imports torch.
        join: on rank 0, what the engines of one choice get of a bucket, one request after the
            other, from the shares of the ranks, by rank.
        is_copy: it sends what was copied before the engines were called.
        is_automatic: it is chosen by ``auto``, not only by its name.
        most_bytes: most bytes of tensors in one request; it splits a larger bucket.
        is_encoded: it carries encodings other than whole tensors.
    """

    transport: str
    reach: Callable[[Places, EnginePlace], Chosen | str]
    route: Callable[[Chosen], Route]
    open: Callable[[RankEnd, Chosen], ShareBuilder | None]
    join: Callable[[Chosen, Shares, Places, Pairs], Sequence[Payload]] = no_payload
    is_copy: bool = True
    is_automatic: bool = True
    most_bytes: int = sys.maxsize
    is_encoded: bool = False


def why_far(ranks: Places, engine: EnginePlace) -> str:
    """Why an engine shares no host with a rank."""
    if not engine.node:
        return "it has several hosts"
    is_near = any(rank.node == engine.node for rank in ranks)
    return "" if is_near else "it runs on another host than all ranks"


class Encoder(Protocol):
    """An encoding in one push of one rank.

    Attributes:
        density: the share of the elements that the push has changed so far, or None if unknown.
        stored: what was sent in place of whole tensors, or None if nothing, or if it is not kept.
    """

    @property
    def density(self) -> float | None: ...
    @property
    def stored(self) -> EncodedPush | None: ...

    def encode(self, pairs: Pairs) -> Pairs:
        """What the routes get in place of a bucket; the bucket itself if the push is whole."""
        ...

    def succeed(self) -> None:
        """All engines hold the push."""
        ...


class Encoding(Protocol):
    """How tensors are written beside the route, if not whole: one rank's, over all its pushes.

    Always true: fingerprints, and the copies for the store, are of the whole tensors, so what an
    engine has made of a bucket is compared with them.

    Attributes:
        name: name of its row in ``encodings``, in the settings, and in what an engine reports.
    """

    @property
    def name(self) -> str: ...

    def goes(self, transport: str, version: int | None, terms: EncodingTerms) -> bool | str:
        """Whether the next push goes so to an engine: else whole, and the encoding prepares the
        one after it; or why it never does by this route.

        Args:
            version: what the engine holds, verified, or None for nothing.
        """
        ...

    def begin(self, push: BegunPush | None) -> Encoder | None:
        """A push begins, or None if it does without, which frees what was kept."""
        ...
