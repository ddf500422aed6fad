"""Rank 0 joins what the ranks have made, and streams it to engines by several routes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from rollout.config import Transport
from rollout.weights.ranks.outgoing import BucketQueue, OfferedBucket, OutgoingStream
from rollout.weights.routes.choice import ROUTES
from rollout.weights.routes.route import Chosen, RankPlace, StreamedBucket
from rollout.weights.tensors.sources import Pairs

pytestmark = pytest.mark.embedded
RANKS = [
    RankPlace("n0", 0, "aa"),
    RankPlace("n0", 0, "bb"),
    RankPlace("n1", 2, "cc"),
    RankPlace("n1", 2),
]


def pairs(value: float = 1.0) -> Pairs:
    return Pairs.of([("x", torch.full((4,), value))])


class Broadcast:
    """In place of ``BroadcastPush``: sends each bucket in two parts."""

    num_joins = 0

    def join(self) -> None:
        self.num_joins += 1

    def parts(self, pairs: Pairs) -> Iterator[StreamedBucket]:
        yield StreamedBucket({"part": 0}, is_last=False)
        yield StreamedBucket({"part": 1}, is_last=True)


def streamed(*buckets: OfferedBucket, **settings: Any) -> list[StreamedBucket]:
    handover: BucketQueue[OfferedBucket] = BucketQueue()
    found: list[StreamedBucket] = []
    stream = OutgoingStream(handover, **settings)
    reading = threading.Thread(target=lambda: found.extend(stream))
    reading.start()
    for index, bucket in enumerate(buckets):
        assert handover.is_wanted(index, 10)
        handover.put(bucket)
    assert handover.is_wanted(len(buckets), 10)
    stream.close()
    reading.join()
    return found


def test_each_host_has_its_path_and_each_gpu_its_handle() -> None:
    def joined(chosen: Chosen, made: Mapping[int, Mapping[str, Any]]) -> Any:
        (payload,) = ROUTES[chosen.transport].join(chosen, made, RANKS, pairs())
        return payload

    paths = {1: {"path": "/a"}, 2: {"path": "/b"}}
    assert joined(Chosen(Transport.SHARED_MEMORY, host=0), paths) == {"path": "/a"}
    assert joined(Chosen(Transport.SHARED_MEMORY, host=2), paths) == {"path": "/b"}
    handles = joined(Chosen(Transport.CUDA_IPC), {0: {"handle": "h0"}, 1: {"handle": "h1"}})
    assert handles["handles"] == {"aa": "h0", "bb": "h1"}
    value = joined(Chosen(Transport.BY_VALUE), {0: {"values": [b"all"]}})
    assert value == b"all"


def test_a_bucket_in_parts_reaches_the_other_engines_with_its_last_part() -> None:
    broadcast = Broadcast()
    buckets = [
        OfferedBucket(pairs(), is_last, [{"shared_memory 0": {"path": path}, "by_value": b"all"}])
        for path, is_last in (("/a", False), ("/b", True))
    ]
    found = streamed(*buckets, broadcast=broadcast)
    assert broadcast.num_joins == 1
    assert [one.is_last for one in found] == [False, False, False, True]
    assert [set(one.payload) for one in found if isinstance(one.payload, Mapping)] == [
        {"distributed"},
        {"distributed", "shared_memory 0", "by_value"},
    ] * 2


def test_a_bucket_that_is_the_same_for_all_engines_is_its_only_payload() -> None:
    taken = OfferedBucket(pairs(), True, [{"by_value": b"all"}], {"x": "taken by a rank"})
    (one,) = streamed(taken, is_single=True)
    assert (one.payload, dict(one.fingerprints)) == (b"all", {"x": "taken by a rank"})
    (one,) = streamed(taken)
    assert one.payload == {"by_value": b"all"}


def test_a_buckets_tensors_are_free_when_the_next_one_is_awaited() -> None:
    handover: BucketQueue[OfferedBucket] = BucketQueue()
    stream = OutgoingStream(handover)
    reading = threading.Thread(target=lambda: [None for _ in stream])
    reading.start()
    assert handover.is_wanted(0, 10)
    bucket = OfferedBucket(pairs(), is_last=False)
    tensor = weakref.ref(bucket.pairs.tensors[0])
    handover.put(bucket)
    del bucket
    assert handover.is_wanted(1, 10)
    gc.collect()
    assert tensor() is None
    stream.close()
    reading.join()
