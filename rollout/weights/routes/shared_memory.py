"""Files in tmpfs: the ranks of a host write buckets, the engines of that host map them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import Transport, WeightsConfig
from rollout.core.errors import WeightsUnavailable
from rollout.core.os_errors import naming_setting
from rollout.weights.routes.buffers import MORE_ROOM, PushBuffers, ShmBuffer, ShmBufferPool
from rollout.weights.routes.rank_end import Places, RankEnd, RouteRow, Shares, why_far
from rollout.weights.routes.route import (
    BUCKETS_AHEAD,
    Chosen,
    EnginePlace,
    Payload,
    PushTarget,
    Route,
    Stage,
)

if TYPE_CHECKING:
    from rollout.weights.format.manifest import TensorSpec
    from rollout.weights.tensors.sources import Pairs


def reach(ranks: Places, engine: EnginePlace) -> Chosen | str:
    """From the ranks on the engine's host."""
    if why := why_far(ranks, engine):
        return why
    near = [rank for rank in ranks if rank.node == engine.node]
    hosts = [rank.host for rank in near if not rank.why_no_room]
    return Chosen(Transport.SHARED_MEMORY, host=min(hosts)) if hosts else near[0].why_no_room


@dataclass(frozen=True, slots=True)
class ByPath(Route):
    """``update_weights_from_disk`` with the folder in ``{"path": ...}``: safetensors files that
    engine and trainer both can read, in tmpfs on one host, or on a shared disk."""

    loads_files = True

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        await target.engine.update_weights_from_disk(
            packed["path"], flush_cache=stage.is_last, weight_version=stage.weight_version
        )


def open_share(end: RankEnd, chosen: Chosen) -> BufferWriter | None:
    """The ranks of the host that was chosen write."""
    if chosen.host != end.own_host:
        return None
    # Fingerprints are of the whole tensors.
    is_hashed = end.terms.hashing_host == end.own_host and chosen.is_full
    return BufferWriter.of(end, end.terms.fingerprints if is_hashed else "")


class BufferWriter:
    """Writes every bucket of ``num_writers`` into a buffer, beginning with bucket ``first``.

    Args:
        fingerprints: the method of the fingerprints that are taken; empty takes none.
        model: its tensors, in whose types the values are checked; None checks none.
    """

    def __init__(
        self,
        pool: ShmBufferPool | PushBuffers,
        *,
        first: int,
        num_writers: int,
        fingerprints: str,
        model: Mapping[str, TensorSpec] | None = None,
    ) -> None:
        self._pool = pool
        self._first = first
        self._num_writers = num_writers
        self._fingerprints = fingerprints
        self._model = model
        self._taken: dict[int, ShmBuffer] = {}

    @classmethod
    def of(cls, end: RankEnd, fingerprints: str) -> BufferWriter:
        """The writer of one of the ranks of a host."""
        return cls(
            end.buffers,
            first=end.writers.index(end.rank),
            num_writers=len(end.writers),
            fingerprints=fingerprints,
            model=end.model if end.terms.checks_values else None,
        )

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any] | None:
        # The engines have asked for this bucket, so they have applied those before the last.
        for applied in [made for made in self._taken if made < index - BUCKETS_AHEAD]:
            self._pool.give(self._taken.pop(applied))
        if index % self._num_writers != self._first:
            return None
        self._taken[index], fingerprints = write_buffer(
            pairs, self._pool, method=self._fingerprints, model=self._model
        )
        return {"path": str(self._taken[index].folder), "fingerprints": dict(fingerprints)}

    def close(self) -> None:
        while self._taken:
            self._pool.give(self._taken.popitem()[1])


def write_buffer(
    pairs: Pairs,
    pool: ShmBufferPool | PushBuffers,
    *,
    method: str,
    model: Mapping[str, TensorSpec] | None = None,
) -> tuple[ShmBuffer, Mapping[str, str]]:
    """Write a bucket into a buffer of the pool; returns it with its fingerprints.

    Args:
        method, model: see ``copy_tensors``.

    Raises:
        WeightMismatch: a value is no number in the type of the model.
    """
    from rollout.weights.tensors.bucket_bytes import copy_tensors

    layout = pool.layouts.of(pairs.specs)
    buffer = pool.take(layout.num_bytes)
    try:
        buffer.write_header(layout.header)
        found = copy_tensors(buffer.view, layout, pairs, method=method, model=model)
        return buffer, found
    except BaseException:
        pool.give(buffer)
        raise


def join(chosen: Chosen, shares: Shares, ranks: Places, pairs: Pairs) -> Sequence[Payload]:
    """The file of the rank that has written on that host."""
    paths = [share["path"] for rank, share in shares.items() if ranks[rank].host == chosen.host]
    return [{"path": path} for path in paths]


def naming_path(weights: WeightsConfig) -> AbstractContextManager[None]:
    """A block in which an OSError names the setting of the files that a push writes."""
    if weights.transport is Transport.DISK:
        return naming_setting("weights.disk_path", weights.disk_path or "", WeightsUnavailable)
    path = weights.shared_memory_path
    return naming_setting("weights.shared_memory_path", path, WeightsUnavailable)


def why_no_room_for(num_bytes: int, room: Sequence[int], where: str) -> str:
    """Why the ranks of a host cannot hold so many bytes, each a part of them.

    Args:
        room: bytes that each of them has room for.
        where: names the host, and the folder.
    """
    if num_bytes // len(room) <= min(room):
        return ""
    most = min(room) * len(room)
    return f"{where} has room for {most} bytes, {num_bytes} are needed; {MORE_ROOM}"


def stream_bytes(largest_bucket: int, num_writers: int) -> int:
    """What the ranks of a host hold of a push that is streamed, each an equal part of it.

    Each rank has one buffer at least, and keeps it for its next bucket.
    """
    return largest_bucket * max(num_writers, BUCKETS_AHEAD + 1)


def joined_folder(buffers: PushBuffers, folders: Sequence[str]) -> Payload:
    """One folder for engines that load all buckets of a push in one call."""
    return {"path": str(buffers.joined([Path(folder) for folder in folders]))}


ROW = RouteRow(
    Transport.SHARED_MEMORY, reach, lambda chosen: ByPath(), open_share, join, is_encoded=True
)
