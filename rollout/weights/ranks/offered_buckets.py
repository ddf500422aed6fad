"""On rank 0: buckets from the words of all ranks, for engines on several ways.

Always true: a bucket's tensors are let go of before the next bucket is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pybase64

from rollout.config import Transport
from rollout.core.errors import WeightsUnavailable
from rollout.weights.push.stream_server import StreamedBucket
from rollout.weights.ranks.bucket_handover import BucketHandover
from rollout.weights.ranks.carrier_choice import Chosen, RankPlace
from rollout.weights.tensors.broadcast_sender import BroadcastPush
from rollout.weights.tensors.bucket_writer import fingerprints_of
from rollout.weights.tensors.payload import around_handle, flattened_bucket
from rollout.weights.tensors.tensor_sources import Pairs
from rollout.weights.transports.carriers import ByBroadcast, ByPath, ByValue, Carrier, Payload
from rollout.weights.transports.mixed import ByHandles, Mixed, Way

Word = Mapping[str, Any]
# What a rank does in a broadcast of its own.
JOIN, SEND = "join", "send"


@dataclass(frozen=True, slots=True)
class OfferedBucket:
    """One bucket that all ranks have made.

    Attributes:
        pairs: rank 0's tensors.
        payload: what the ranks have made of it, by way.
        sender: the rank other than 0 that broadcasts it; 0 if rank 0 does, or none.
        parts: what the engines get before each of that rank's broadcasts.
    """

    pairs: Pairs
    is_last: bool
    payload: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    sender: int = 0
    parts: Sequence[Payload] = ()


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
    sender = 0
    parts: Sequence[Payload] = ()
    for number, (word, rank) in enumerate(zip(words, ranks, strict=True)):
        fingerprints |= word.get("fingerprints", {})
        if "path" in word:
            way = Chosen(Transport.SHARED_MEMORY, host=rank.host).way
            payload[way] = {"path": word["path"]}
        if "parts" in word:
            sender, parts = number, word["parts"]
        if "handle" in word:
            handles[rank.gpu] = word["handle"]
    if handles:
        head, tail = map(pybase64.b64encode_as_string, around_handle(pairs))
        payload[Transport.CUDA_IPC] = {"head": head, "tail": tail, "handles": handles}
    is_last = bool(words[0]["is_last"])
    return OfferedBucket(pairs, is_last, payload, fingerprints, sender, parts)


@dataclass(frozen=True, slots=True)
class OfferedStream:
    """The buckets of a push, for its stream; iterated in the stream's thread.

    Attributes:
        broadcast: sends rank 0's tensors to the engines that are on no rank's host; other ranks
            join them and send when this asks for it.
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
            if terms := self.broadcast.terms_of_others:
                self._ask({"do": JOIN, "terms": terms})
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
        parts = (
            self._asked(bucket)
            if bucket.sender
            else self.broadcast.parts(bucket.pairs, is_last=True)
        )
        for part in parts:
            is_last = part.is_last
            # The other engines get the whole bucket with its last part.
            ways = {**(payload if is_last else {}), Transport.DISTRIBUTED: part.payload}
            found = {**part.fingerprints, **bucket.fingerprints}
            yield replace(
                part, payload=ways, is_last=is_last and bucket.is_last, fingerprints=found
            )

    def _asked(self, bucket: OfferedBucket) -> Iterator[StreamedBucket]:
        """The parts of a bucket that another rank broadcasts when all readers have one."""
        last = len(bucket.parts) - 1
        for number, part in enumerate(bucket.parts):
            task = {"do": SEND, "sender": bucket.sender, "part": number}
            yield StreamedBucket(part, number == last, then=partial(self._ask, task))

    def _ask(self, task: Word) -> None:
        """Have the other ranks do this.

        Raises:
            WeightsUnavailable: one of them could not.
        """
        if failed := [word["why_not"] for word in self.offered.ask(task) if "why_not" in word]:
            raise WeightsUnavailable("; ".join(failed[:4]))
