"""Rank 0 joins what the ranks have made, and streams it to engines on several ways."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from engines.tensors.fingerprint import BYTES
from rollout.config import Transport
from rollout.core.errors import WeightsUnavailable
from rollout.weights.push.stream_server import StreamedBucket
from rollout.weights.ranks.bucket_handover import BucketHandover
from rollout.weights.ranks.carrier_choice import Chosen, RankPlace
from rollout.weights.ranks.offered_buckets import (
    OfferedBucket,
    OfferedStream,
    join_words,
    mixed_carrier,
)
from rollout.weights.tensors import bytes_fingerprint
from rollout.weights.tensors.tensor_sources import Pairs
from rollout.weights.transports.carriers import ByBroadcast, ByPath, ByValue
from rollout.weights.transports.mixed import ByHandles

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

    def parts(self, pairs: Pairs, is_last: bool) -> Iterator[StreamedBucket]:
        assert is_last
        yield StreamedBucket({"part": 0}, is_last=False)
        yield StreamedBucket({"part": 1}, is_last=True)


def streamed(*buckets: OfferedBucket, **settings: Any) -> list[StreamedBucket]:
    handover: BucketHandover[OfferedBucket] = BucketHandover()
    settings = {"broadcast": None, "is_by_value": False, "fingerprints": "", **settings}
    found: list[StreamedBucket] = []
    stream = OfferedStream(handover, **settings)
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
    words: list[Mapping[str, Any]] = [
        {"is_last": True, "handle": "h0"},
        {"is_last": True, "path": "/a", "fingerprints": {"x": "1"}, "handle": "h1"},
        {"is_last": True, "path": "/b", "fingerprints": {}},
        {"is_last": True},
    ]
    bucket = join_words(words, RANKS, pairs())
    assert bucket.payload["shared_memory 0"] == {"path": "/a"}
    assert bucket.payload["shared_memory 2"] == {"path": "/b"}
    assert bucket.payload["cuda_ipc"]["handles"] == {"aa": "h0", "bb": "h1"}
    assert bucket.fingerprints == {"x": "1"}
    assert bucket.is_last


def test_the_ways_of_carriers_are_those_of_buckets() -> None:
    chosen = {
        "a": Chosen(Transport.CUDA_IPC, gpus=("aa",)),
        "b": Chosen(Transport.SHARED_MEMORY, host=2),
        "c": Chosen(Transport.DISTRIBUTED),
        "d": Chosen(Transport.TENSOR),
    }
    ways = mixed_carrier(chosen).ways
    assert {name: (way.name, way.carrier) for name, way in ways.items()} == {
        "a": ("cuda_ipc", ByHandles(("aa",))),
        "b": ("shared_memory 2", ByPath()),
        "c": ("distributed", ByBroadcast()),
        "d": ("tensor", ByValue("flattened_bucket")),
    }


def test_a_bucket_in_parts_reaches_the_other_engines_with_its_last_part() -> None:
    broadcast = Broadcast()
    buckets = [
        OfferedBucket(pairs(), is_last, {"shared_memory 0": {"path": path}})
        for path, is_last in (("/a", False), ("/b", True))
    ]
    found = streamed(*buckets, broadcast=broadcast, is_by_value=True)
    assert broadcast.num_joins == 1
    assert [one.is_last for one in found] == [False, False, False, True]
    assert [set(one.payload) for one in found if isinstance(one.payload, Mapping)] == [
        {"distributed"},
        {"distributed", "shared_memory 0", "tensor"},
    ] * 2


def test_fingerprints_are_taken_here_where_no_rank_takes_them() -> None:
    (one,) = streamed(OfferedBucket(pairs(), is_last=True), fingerprints=BYTES)
    assert dict(one.fingerprints) == {"x": bytes_fingerprint("x", torch.ones(4))}
    taken = OfferedBucket(pairs(), is_last=True, fingerprints={"x": "taken by a rank"})
    (one,) = streamed(taken)
    assert dict(one.fingerprints) == {"x": "taken by a rank"}


def test_a_buckets_tensors_are_free_when_the_next_one_is_awaited() -> None:
    handover: BucketHandover[OfferedBucket] = BucketHandover()
    stream = OfferedStream(handover, None, is_by_value=True, fingerprints="")
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
    handover: BucketHandover[OfferedBucket] = BucketHandover()
    broadcast: Any = Broadcast({"first": "g"})
    stream = OfferedStream(handover, broadcast, is_by_value=False, fingerprints="")
    asked: list[Any] = []

    def all_ranks() -> None:
        while not handover.is_over:
            handover.await_end(10)
            if (task := handover.take_task()) is not None:
                asked.append(task)
                handover.answer([{}, {}])

    ranks = threading.Thread(target=all_ranks)
    ranks.start()
    files = {"shared_memory 0": {"path": "/a"}}
    parts = ({"names": ["x"]}, {"names": ["y"]})
    handover.put(OfferedBucket(pairs(), True, files, sender=1, parts=parts))
    buckets = iter(stream)
    first = next(buckets)
    assert asked == [{"do": "join", "terms": {"first": "g"}}]
    assert (first.payload, first.is_last) == ({"distributed": parts[0]}, False)
    assert first.then is not None
    first.then()
    last = next(buckets)
    assert (last.payload, last.is_last) == ({**files, "distributed": parts[1]}, True)
    assert last.then is not None
    last.then()
    assert asked[1:] == [{"do": "send", "sender": 1, "part": part} for part in (0, 1)]
    stream.close()
    ranks.join()


def test_a_broadcast_that_another_rank_could_not_send_ends_the_stream() -> None:
    handover: BucketHandover[OfferedBucket] = BucketHandover()
    stream = OfferedStream(handover, None, is_by_value=False, fingerprints="")
    raised: list[BaseException] = []

    def asks() -> None:
        for _ in range(2):
            with pytest.raises(WeightsUnavailable) as error:
                stream._ask({"do": "send"})
            raised.append(error.value)

    asking = threading.Thread(target=asks)
    asking.start()
    handover.await_end(10)
    assert handover.take_task() == {"do": "send"}
    handover.answer([{}, {"why_not": "rank 1: the group is closed"}])
    handover.await_end(10)
    stream.close()
    asking.join()
    assert [str(one) for one in raised] == ["rank 1: the group is closed", "the push has ended"]
