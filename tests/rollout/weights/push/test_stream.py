"""Buckets handed out one after the other, to all groups or to none."""

import asyncio
import gc
import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rollout.core.errors import WeightsUnavailable
from rollout.weights.push.stream_reader import PushStreamReader
from rollout.weights.push.stream_server import PushStreamServer, StreamedBucket
from rollout.weights.routes.route import BroadcastMember
from tests.support.processes import wait_until


class Making:
    """Buckets that say when they were made."""

    def __init__(self, num: int, *, fails_at: int = -1) -> None:
        self.num = num
        self.made: list[int] = []
        self.fails_at = fails_at
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[StreamedBucket]:
        try:
            for index in range(self.num):
                if index == self.fails_at:
                    raise RuntimeError("out of memory")
                self.made.append(index)
                payload = bytes([index]) * 5 if index % 2 else {"path": f"/{index}"}
                yield StreamedBucket(payload, index == self.num - 1, {f"t{index}": f"xxh3:{index}"})
        finally:
            self.closed.set()


def reader_of(server: PushStreamServer, name: str, num_readers: int = 1) -> PushStreamReader:
    return PushStreamReader(replace(server.address, num_readers=num_readers), name)


async def read_all(reader: PushStreamReader, num_ranks: int = 1) -> list[Any]:
    try:
        await reader.open([BroadcastMember("of " + reader._name, num_ranks)])
        return [payload async for payload, _ in reader]
    finally:
        await reader.close()


ALL = [{"path": "/0"}, b"\x01" * 5, {"path": "/2"}]


async def test_every_reader_gets_every_bucket_and_its_own_place() -> None:
    server = PushStreamServer(
        iter(Making(3)), terms=lambda all_: {"world_size": 1 + sum(one.num_ranks for one in all_)}
    )
    one, other = (reader_of(server, name, 2) for name in ("a", "b"))
    assert await asyncio.gather(read_all(one, 2), read_all(other, 1)) == [ALL, ALL]
    assert one.terms == {"world_size": 4, "rank_offset": 1}
    assert other.terms == {"world_size": 4, "rank_offset": 3}
    assert one.fingerprints == {"t0": "xxh3:0", "t1": "xxh3:1", "t2": "xxh3:2"}
    server.close()


async def test_a_bucket_is_made_when_all_have_applied_the_last_but_one() -> None:
    making = Making(4)
    server = PushStreamServer(iter(making))
    slow, fast = (reader_of(server, name, 2) for name in ("slow", "fast"))
    await asyncio.gather(slow.open([]), fast.open([]))
    buckets, others = aiter(slow), aiter(fast)
    for index in range(3):
        await anext(buckets)
        await anext(others)
        # ``index`` is being applied, so the next may have been made, and none after it.
        assert len(making.made) <= index + 2
    await slow.close()
    await fast.close()
    server.close()
    assert making.closed.wait(5)


async def test_when_a_group_does_not_come_nobody_gets_anything() -> None:
    making = Making(2)
    server = PushStreamServer(iter(making), gather_s=0.2)
    with pytest.raises(WeightsUnavailable, match=r"1 of 2 groups con.* \(a\); no engine was"):
        await read_all(reader_of(server, "a", 2))
    assert making.made == []
    server.close()


async def test_a_bucket_that_cannot_be_made_is_told_to_every_reader() -> None:
    making = Making(3, fails_at=1)
    server = PushStreamServer(iter(making))
    results = await asyncio.gather(
        *(read_all(reader_of(server, name, 2)) for name in ("a", "b")), return_exceptions=True
    )
    assert [str(one) for one in results] == [
        "the trainer could not make a bucket: out of memory"
    ] * 2
    server.close()


@pytest.mark.parametrize("num_made", [0, 1, 2])
@pytest.mark.parametrize("ends", ["SystemExit", "without a last one"])
async def test_every_end_of_the_buckets_frees_the_readers_at_once(num_made: int, ends: str) -> None:
    def buckets() -> Iterator[StreamedBucket]:
        for _ in range(num_made):
            yield StreamedBucket(b"x", False)
        if ends == "SystemExit":
            sys.exit(ends)

    server = PushStreamServer(buckets(), timeout_s=60)
    async with asyncio.timeout(20):  # the stream's own deadline is later
        with pytest.raises(WeightsUnavailable, match=ends):
            await read_all(reader_of(server, "a"))
    server.close()


async def test_a_reader_that_leaves_does_not_hold_up_the_others() -> None:
    server = PushStreamServer(iter(Making(3)), timeout_s=30)
    leaves, stays = reader_of(server, "a", 2), reader_of(server, "b", 2)
    reading = asyncio.create_task(read_all(stays))
    await leaves.open([])
    await leaves.close()
    assert await asyncio.wait_for(reading, 10) == ALL
    server.close()


async def test_a_reader_that_is_closed_while_it_waits_has_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = PushStreamServer(iter(Making(1)))
    reader = reader_of(server, "a", num_readers=2)
    opening = asyncio.ensure_future(reader.open([]))
    assert await asyncio.to_thread(wait_until, lambda: bool(server._readers), 20)
    opening.cancel()
    await asyncio.wait([opening])
    await reader.close()
    gc.collect()
    assert not caplog.text
    server.close()


async def test_the_trainers_own_part_comes_while_all_have_the_bucket() -> None:
    is_done = threading.Event()
    done = []

    def broadcast() -> None:
        done.append(threading.current_thread().name)
        is_done.set()

    server = PushStreamServer(iter([StreamedBucket({"names": []}, True, then=broadcast)]))
    reader = reader_of(server, "a")
    await reader.open([])
    async for payload, _ in reader:
        assert payload == {"names": []}
        # As in a broadcast: no reader finishes the bucket before the trainer has broadcast it.
        assert await asyncio.to_thread(is_done.wait, 30)
    await reader.close()
    assert done == ["push-stream-make"]
    server.close()


async def test_who_waits_for_a_closed_feed_is_told() -> None:
    hold = threading.Event()

    def never() -> Iterator[StreamedBucket]:
        hold.wait(10)
        yield StreamedBucket({}, True)

    server = PushStreamServer(never())
    reader = reader_of(server, "a")
    await reader.open([])
    reading = asyncio.create_task(anext(aiter(reader)))  # type: ignore[arg-type]
    closing = asyncio.create_task(asyncio.to_thread(server.close))
    with pytest.raises(WeightsUnavailable):
        await reading
    await reader.close()
    hold.set()
    await closing


async def test_a_stranger_is_not_served_and_does_not_count() -> None:
    server = PushStreamServer(iter(Making(3)))
    stranger = PushStreamReader(replace(server.address, token="guess"), "a")
    with pytest.raises(WeightsUnavailable, match="wrong token"):
        await stranger.open([])
    await stranger.close()
    assert await read_all(reader_of(server, "a")) == ALL
    server.close()


async def test_a_trainer_that_is_gone_is_named_with_its_address() -> None:
    server = PushStreamServer(iter(Making(1)))
    server.close()
    with pytest.raises(WeightsUnavailable, match=rf"127.0.0.1:{server.address.port} cannot be"):
        await read_all(reader_of(server, "a"))


def test_what_is_over_is_let_go() -> None:
    ended: queue.Queue[bool] = queue.Queue()
    making = Making(1)
    PushStreamServer(iter(making), when_ended=ended.put).close()
    assert ended.get(timeout=5) is False
    assert making.made == []


@pytest.mark.parametrize("keeping", [("a", "b"), ("a",), ()])
async def test_a_group_is_kept_if_every_reader_keeps_it(keeping: tuple[str, ...]) -> None:
    ended: queue.Queue[bool] = queue.Queue()
    server = PushStreamServer(iter(Making(2)), when_ended=ended.put)
    readers = [reader_of(server, name, 2) for name in ("a", "b")]
    for one in readers:
        one.keeps = one._name in keeping
    await asyncio.gather(*(read_all(one) for one in readers))
    assert await asyncio.to_thread(ended.get, timeout=5) is (len(keeping) == 2)
    server.close()


async def test_a_reader_that_leaves_early_keeps_nothing() -> None:
    ended: queue.Queue[bool] = queue.Queue()
    server = PushStreamServer(iter(Making(3)), when_ended=ended.put)
    stays, leaves = reader_of(server, "a", 2), reader_of(server, "b", 2)
    stays.keeps = leaves.keeps = True
    reading = asyncio.create_task(read_all(stays))
    await leaves.open([])
    await leaves.close()
    assert await reading == ALL
    assert await asyncio.to_thread(ended.get, timeout=5) is False
    server.close()
