"""One push to many engines: session, buckets, version, flush."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeTensor, pack_tensors
from engines.protocol.errors import EngineRejected, EngineUnreachable
from rollout.core.errors import WeightsUnavailable
from rollout.weights.push.stream_reader import StaticBuckets
from rollout.weights.push.weight_push import PushTarget, WeightPush, push_weights
from tests.support.builders import manifest, push
from tests.support.virtual_time import virtual_time


def targets(*engines: FakeEngine) -> Mapping[str, PushTarget]:
    return {engine.engine_id: PushTarget(engine) for engine in engines}


def two_engines() -> tuple[FakeEngine, FakeEngine]:
    return FakeEngine("a"), FakeEngine("b")


def updates(engine: FakeEngine) -> list[dict]:
    return [
        dict(call.arguments)
        for call in engine.calls
        if call.operation == "update_weights_from_tensor"
    ]


async def test_every_engine_holds_the_same_new_weights_afterwards() -> None:
    one, other = two_engines()
    before = one.weights.checksum()
    answers = await push_weights(push(4, num_buckets=2), targets(one, other), budget_s=10)
    assert all(answer.failure is None for answer in answers.values())
    assert one.weights.checksum() == other.weights.checksum() != before
    assert await one.weight_version() == "4"
    assert not one.is_updating


async def test_cache_and_version_change_with_the_last_bucket_only() -> None:
    engine = FakeEngine("a")
    await push_weights(push(4, num_buckets=3), targets(engine), budget_s=10)
    assert updates(engine) == [
        {"flush_cache": False, "weight_version": None},
        {"flush_cache": False, "weight_version": None},
        {"flush_cache": True, "weight_version": "4"},
    ]
    assert not engine.is_cache_stale


async def test_an_engine_gets_the_next_bucket_when_every_engine_has_the_one_before() -> None:
    one, other = two_engines()
    gate = other.hold("update_weights_from_tensor")
    pushing = asyncio.create_task(
        push_weights(push(1, num_buckets=2), targets(one, other), budget_s=10)
    )
    await gate.entered.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(updates(one)) == 1
    gate.open()
    await pushing
    assert len(updates(one)) == 2


async def test_buckets_are_awaited_one_after_the_other() -> None:
    engine = FakeEngine("a")
    fetched: list[int] = []

    async def fetch(index: int) -> bytes:
        fetched.append(len(updates(engine)))
        return push(1, num_buckets=3).buckets[index]  # type: ignore[return-value]

    the_push = WeightPush(1, manifest(), [fetch(index) for index in range(3)])
    await push_weights(the_push, targets(engine), budget_s=10)
    assert fetched == [0, 1, 2]


async def test_the_payload_is_sent_once_per_rank() -> None:
    engine = FakeEngine("a")
    got: list[int] = []

    class Counting(FakeEngine):
        async def update_weights_from_tensor(self, payloads, **more) -> None:
            got.append(len(payloads))

    engine = Counting("a")
    await push_weights(push(1), {"a": PushTarget(engine, payload_copies=4)}, budget_s=10)
    assert got == [4]


async def test_an_engine_that_failed_gets_no_further_bucket_and_its_session_ends() -> None:
    bad, good = two_engines()
    bad.fail_next("update_weights_from_tensor", EngineRejected("no", status=400))
    answers = await push_weights(push(1, num_buckets=3), targets(bad, good), budget_s=10)
    assert "update_weights failed" in str(answers["a"].failure)
    assert answers["b"].failure is None
    assert len(updates(bad)) == 1
    assert not bad.is_updating
    assert await bad.weight_version() == "unverified-1"


async def test_an_engine_that_would_not_begin_gets_nothing() -> None:
    bad, good = two_engines()
    bad.fail_next("begin_weight_update", EngineUnreachable("connection broke"))
    answers = await push_weights(push(1), targets(bad, good), budget_s=10)
    assert bad.operations() == ["begin_weight_update"]
    assert answers["a"].failure is not None
    assert answers["b"].failure is None


async def test_an_engine_that_would_not_be_renamed_gets_no_bucket_and_keeps_its_number() -> None:
    bad, good = two_engines()
    bad.fail_next("update_weight_version", EngineUnreachable("connection broke"))
    answers = await push_weights(push(1), targets(bad, good), budget_s=10)
    assert "update_weight_version failed" in str(answers["a"].failure)
    assert not updates(bad)
    assert not bad.is_updating
    assert await bad.weight_version() == "0"
    assert answers["b"].failure is None


async def test_a_push_whose_first_bucket_never_comes_leaves_the_number_of_whole_weights() -> None:
    engine = FakeEngine("a")

    async def lost() -> bytes:
        raise WeightsUnavailable("the trainer is gone")

    with pytest.raises(WeightsUnavailable):
        await push_weights(WeightPush(1, manifest(), [lost()]), targets(engine), budget_s=10)
    assert await engine.weight_version() == "0"


@pytest.mark.parametrize("num_sent", [1, 2, 3])
@pytest.mark.parametrize("held", [None, 0])
async def test_from_its_first_bucket_to_its_last_a_push_has_no_number(
    num_sent: int, held: int | None
) -> None:
    engine = FakeEngine("a")
    versions: list[str] = []
    send = engine.update_weights_from_tensor

    async def seen(*payloads: Any, **more: Any) -> None:
        versions.append(engine._version)
        if len(versions) > num_sent:
            raise EngineUnreachable("the launcher is gone")
        await send(*payloads, **more)

    engine.update_weights_from_tensor = seen  # type: ignore[method-assign]
    target = PushTarget(engine, weight_version=held)
    await push_weights(push(4, num_buckets=3), {"a": target}, budget_s=10)
    name = "unverified-4" if held is None else "unverified-4-over-0"
    assert set(versions) == {name}
    assert not name.isdecimal()
    assert await engine.weight_version() == ("4" if num_sent == 3 else name)


async def test_an_engine_that_would_not_end_has_failed() -> None:
    engine = FakeEngine("a")
    engine.fail_next("end_weight_update", EngineUnreachable("connection broke"))
    answers = await push_weights(push(1), targets(engine), budget_s=10)
    assert "end_weight_update failed" in str(answers["a"].failure)


async def test_the_first_of_several_failures_is_the_one_that_is_told() -> None:
    engine = FakeEngine("a")
    engine.fail_next("update_weights_from_tensor", EngineRejected("first", status=400))
    engine.fail_next("end_weight_update", EngineUnreachable("second"))
    answers = await push_weights(push(1), targets(engine), budget_s=10)
    assert "first" in str(answers["a"].failure)


async def test_a_bucket_that_never_comes_ends_the_session_of_every_engine() -> None:
    one, other = two_engines()

    async def lost() -> bytes:
        raise WeightsUnavailable("the trainer is gone")

    the_push = WeightPush(1, manifest(), [push(1, num_buckets=2).buckets[0], lost()])
    with pytest.raises(WeightsUnavailable):
        await push_weights(the_push, targets(one, other), budget_s=10)
    assert not one.is_updating
    assert not other.is_updating
    assert await one.weight_version() == "unverified-1"


@pytest.mark.parametrize("held", ["begin_weight_update", "update_weights_from_tensor"])
async def test_a_cancelled_push_ends_the_sessions_it_began(held: str) -> None:
    one, other = two_engines()
    gate = other.hold(held)
    pushing = asyncio.create_task(push_weights(push(1), targets(one, other), budget_s=10))
    await gate.entered.wait()
    pushing.cancel()
    await asyncio.sleep(0)
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert not one.is_updating
    assert not other.is_updating


@virtual_time
async def test_the_whole_push_has_one_deadline() -> None:
    engine = FakeEngine("a")
    engine.hold("update_weights_from_tensor")
    started = asyncio.get_running_loop().time()
    answers = await push_weights(push(1, num_buckets=3), targets(engine), budget_s=60)
    assert "update_weights took longer than 60 s" in str(answers["a"].failure)
    assert asyncio.get_running_loop().time() - started < 70
    assert engine.operations()[-1] == "end_weight_update"


@virtual_time
async def test_a_source_that_never_begins_ends_with_the_deadline_of_the_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(source: StaticBuckets, members: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(StaticBuckets, "open", never)
    engine = FakeEngine("a")
    late = r"weight version 7: its source had not begun when the 60 s of the push were over"
    with pytest.raises(WeightsUnavailable, match=late):
        await push_weights(push(7), targets(engine), budget_s=60)
    assert not engine.is_updating


@virtual_time
@pytest.mark.parametrize("num_sent", [0, 1, 2])
async def test_a_bucket_that_never_comes_ends_with_the_deadline_of_the_push(num_sent: int) -> None:
    engine = FakeEngine("a")
    buckets = push(7, num_buckets=3).buckets[:num_sent]
    stuck: asyncio.Future[bytes] = asyncio.Future()
    started = asyncio.get_running_loop().time()
    late = rf"weight version 7: bucket {num_sent} was not there when the 60 s"
    with pytest.raises(WeightsUnavailable, match=late):
        await push_weights(
            WeightPush(7, manifest(), [*buckets, stuck]), targets(engine), budget_s=60
        )
    assert asyncio.get_running_loop().time() - started < 70
    assert stuck.cancelled()
    assert not engine.is_updating


async def test_an_engine_without_sessions_gets_only_buckets() -> None:
    engine = FakeEngine("a", needs_session=False)
    await push_weights(push(1), {"a": PushTarget(engine, has_session=False)}, budget_s=10)
    assert engine.operations() == ["update_weight_version", "update_weights_from_tensor"]


async def test_a_wrong_shape_that_gets_through_kills_the_engine_and_is_reported() -> None:
    engine = FakeEngine("a")
    payload = pack_tensors({"lm_head.weight": FakeTensor((1, 1))})
    answers = await push_weights(WeightPush(1, manifest(), [payload]), targets(engine), budget_s=10)
    assert engine.is_dead
    assert "connection broke" in str(answers["a"].failure)
