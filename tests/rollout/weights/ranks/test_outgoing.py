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
from rollout.core.errors import WeightsUnavailable
from rollout.weights.ranks.messages import BroadcastDone
from rollout.weights.ranks.outgoing import BucketQueue, OfferedBucket, OutgoingStream
from rollout.weights.routes.choice import ROUTES
from rollout.weights.routes.route import BroadcastTask, Chosen, RankPlace, StreamedBucket
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

    def __init__(self, terms_of_others: Mapping[str, Any] | None = None) -> None:
        self.terms_of_others = terms_of_others or {}

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
    value = joined(Chosen(Transport.TENSOR), {0: {"values": [b"all"]}})
    assert value == b"all"


def test_a_bucket_in_parts_reaches_the_other_engines_with_its_last_part() -> None:
    broadcast = Broadcast()
    buckets = [
        OfferedBucket(pairs(), is_last, [{"shared_memory 0": {"path": path}, "tensor": b"all"}])
        for path, is_last in (("/a", False), ("/b", True))
    ]
    found = streamed(*buckets, broadcast=broadcast)
    assert broadcast.num_joins == 1
    assert [one.is_last for one in found] == [False, False, False, True]
    assert [set(one.payload) for one in found if isinstance(one.payload, Mapping)] == [
        {"distributed"},
        {"distributed", "shared_memory 0", "tensor"},
    ] * 2


def test_a_bucket_that_is_the_same_for_all_engines_is_its_only_payload() -> None:
    taken = OfferedBucket(pairs(), True, [{"tensor": b"all"}], {"x": "taken by a rank"})
    (one,) = streamed(taken, is_single=True)
    assert (one.payload, dict(one.fingerprints)) == (b"all", {"x": "taken by a rank"})
    (one,) = streamed(taken)
    assert one.payload == {"tensor": b"all"}


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


def test_another_rank_joins_first_and_sends_when_all_readers_have_a_part() -> None:
    handover: BucketQueue[OfferedBucket] = BucketQueue()
    broadcast: Any = Broadcast({"first": "g"})
    stream = OutgoingStream(handover, broadcast)
    asked: list[Any] = []

    def all_ranks() -> None:
        while not handover.is_over:
            handover.await_end(10)
            if (task := handover.take_task()) is not None:
                asked.append(task)
                handover.answer([BroadcastDone(), BroadcastDone()])

    ranks = threading.Thread(target=all_ranks)
    ranks.start()
    files = {"shared_memory 0": {"path": "/a"}}
    parts = ({"names": ["x"]}, {"names": ["y"]})
    handover.put(OfferedBucket(pairs(), True, [files], sender=1, parts=parts))
    buckets = iter(stream)
    first = next(buckets)
    assert asked == [BroadcastTask({"first": "g"})]
    assert (first.payload, first.is_last) == ({"distributed": parts[0]}, False)
    assert first.then is not None
    first.then()
    last = next(buckets)
    assert (last.payload, last.is_last) == ({**files, "distributed": parts[1]}, True)
    assert last.then is not None
    last.then()
    assert asked[1:] == [BroadcastTask(None, 1, part) for part in (0, 1)]
    stream.close()
    ranks.join()


def test_a_broadcast_that_another_rank_could_not_send_ends_the_stream() -> None:
    handover: BucketQueue[OfferedBucket] = BucketQueue()
    stream = OutgoingStream(handover)
    raised: list[BaseException] = []

    def asks() -> None:
        for _ in range(2):
            with pytest.raises(WeightsUnavailable) as error:
                stream._ask(BroadcastTask(None, 1))
            raised.append(error.value)

    asking = threading.Thread(target=asks)
    asking.start()
    handover.await_end(10)
    assert handover.take_task() == BroadcastTask(None, 1)
    handover.answer([BroadcastDone(), BroadcastDone("rank 1: the group is closed")])
    handover.await_end(10)
    stream.close()
    asking.join()
    assert [str(one) for one in raised] == ["rank 1: the group is closed", "the push has ended"]
