"""The route by value: tensors travel in the request itself.  Works everywhere, and copies most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout.config import Transport
from rollout.weights.format.bucket_layout import split_by_size
from rollout.weights.routes.rank_end import Places, RankEnd, RouteRow, Shares
from rollout.weights.routes.route import (
    Chosen,
    EnginePlace,
    Payload,
    PushTarget,
    Route,
    Stage,
    encoded,
)

if TYPE_CHECKING:
    from rollout.weights.tensors.sources import Pairs

# In one request.  It is copied a dozen times on its way.  Larger buffers get new memory from the
# kernel for each copy, which costs ten times the copy.
_MOST_BYTES = 16 << 20


def reach(ranks: Places, engine: EnginePlace) -> Chosen | str:
    return Chosen(Transport.BY_VALUE)


@dataclass(frozen=True, slots=True)
class ByValue(Route):
    """``update_weights_from_tensor`` with the bytes of the tensors.

    Attributes:
        load_format: ``flattened_bucket`` or None for a pickle of (name, tensor).
    """

    load_format: str | None = None

    needs_session = True

    def pack(self, payload: Payload) -> Any:
        return encoded(payload, "a push by value has buckets of bytes")

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        more = {} if self.load_format is None else {"load_format": self.load_format}
        await target.engine.update_weights_from_tensor(
            [packed] * target.payload_copies,
            flush_cache=stage.is_last,
            weight_version=stage.weight_version,
            **more,
        )


def open_share(end: RankEnd, chosen: Chosen) -> ValueBuilder | None:
    """Rank 0 sends."""
    return ValueBuilder() if end.rank == 0 else None


class ValueBuilder:
    """Pickles each bucket, on rank 0, in parts."""

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any]:
        from rollout.weights.tensors.payload import flattened_bucket

        parts = split_by_size([spec.num_bytes for spec in pairs.specs], _MOST_BYTES)
        return {"values": [flattened_bucket(pairs[part]) for part in parts]}

    def close(self) -> None:
        """It holds nothing."""


def join(chosen: Chosen, shares: Shares, ranks: Places, pairs: Pairs) -> Sequence[Payload]:
    """Rank 0's bytes."""
    values: list[bytes] = shares[0]["values"]
    return values


ROW = RouteRow(
    Transport.BY_VALUE,
    reach,
    lambda chosen: ByValue("flattened_bucket"),
    open_share,
    join,
    most_bytes=_MOST_BYTES,
    is_encoded=True,
)
