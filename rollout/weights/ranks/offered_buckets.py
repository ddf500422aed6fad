"""On rank 0: buckets from the words of all ranks, for engines on several ways.

Always true: a bucket's tensors are let go of before the next bucket is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pybase64

from rollout.config import Transport
from rollout.weights.push.stream_server import StreamedBucket
from rollout.weights.ranks.bucket_handover import BucketHandover
from rollout.weights.ranks.carrier_choice import Chosen, RankPlace
from rollout.weights.tensors.broadcast_sender import BroadcastPush
from rollout.weights.tensors.bucket_writer import fingerprints_of
from rollout.weights.tensors.payload import around_handle, flattened_bucket
from rollout.weights.tensors.tensor_sources import Pairs
from rollout.weights.transports.carriers import ByBroadcast, ByPath, ByValue, Carrier
from rollout.weights.transports.mixed import ByHandles, Mixed, Way

Word = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OfferedBucket:
    """One bucket that all ranks have made.

    Attributes:
        pairs: rank 0's tensors.
        payload: what the ranks have made of it, by way.
    """

    pairs: Pairs
    is_last: bool
    payload: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)


def mixed_carrier(chosen: Mapping[str, Chosen]) -> Mixed:
    """Sends to each engine on the way that was chosen for it."""
    return Mixed({name: Way(one.way, _carrier(one)) for name, one in chosen.items()})


def _carrier(chosen: Chosen) -> Carrier:
    match chosen.transport:
        case Transport.CUDA_IPC:
            return ByHandles(chosen.gpus)
        case Transport.SHARED_MEMORY | Transport.DISK:
            return ByPath()
        case Transport.DISTRIBUTED:
            return ByBroadcast()
    return ByValue(load_format="flattened_bucket")


def join_words(words: Sequence[Word], ranks: Sequence[RankPlace], pairs: Pairs) -> OfferedBucket:
    """A bucket from what each rank says of its part."""
    payload: dict[str, Any] = {}
    fingerprints: dict[str, str] = {}
    handles = {}
    for word, rank in zip(words, ranks, strict=True):
        if "path" in word:
            way = Chosen(Transport.SHARED_MEMORY, host=rank.host).way
            payload[way] = {"path": word["path"]}
            fingerprints |= word["fingerprints"]
        if "handle" in word:
            handles[rank.gpu] = word["handle"]
    if handles:
        head, tail = map(pybase64.b64encode_as_string, around_handle(pairs))
        payload[Transport.CUDA_IPC] = {"head": head, "tail": tail, "handles": handles}
    return OfferedBucket(pairs, bool(words[0]["is_last"]), payload, fingerprints)


@dataclass(frozen=True, slots=True)
class OfferedStream:
    """The buckets of a push, for its stream; iterated in the stream's thread.

    Attributes:
        broadcast: sends rank 0's tensors to the engines that are on no rank's host.
        is_by_value: some engine gets the bytes.
        fingerprints: the method of those that are taken here; empty if ranks take them.
    """

    offered: BucketHandover[OfferedBucket]
    broadcast: BroadcastPush | None
    is_by_value: bool
    fingerprints: str

    def __iter__(self) -> Iterator[StreamedBucket]:
        if self.broadcast is not None:
            self.broadcast.join()
        for bucket in self.offered:
            parts = self._parts(bucket)
            del bucket
            yield from parts
            del parts

    def close(self) -> None:
        """The stream has ended."""
        self.offered.close()

    def _parts(self, bucket: OfferedBucket) -> Iterator[StreamedBucket]:
        payload = dict(bucket.payload)
        if self.is_by_value:
            payload[Transport.TENSOR] = flattened_bucket(bucket.pairs)
        if self.broadcast is None:
            found = {**fingerprints_of(bucket.pairs, self.fingerprints), **bucket.fingerprints}
            yield StreamedBucket(payload, bucket.is_last, found)
            return
        for part in self.broadcast.parts(bucket.pairs, is_last=True):
            is_last = part.is_last
            # The other engines get the whole bucket with its last part.
            ways = {**(payload if is_last else {}), Transport.DISTRIBUTED: part.payload}
            found = {**part.fingerprints, **bucket.fingerprints}
            yield replace(
                part, payload=ways, is_last=is_last and bucket.is_last, fingerprints=found
            )
