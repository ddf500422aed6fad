"""Engines come and go, and die, while requests run."""

import asyncio
import random

import pytest

from rollout.router import BackendState
from tests.rollout.router.conftest import hold_one
from tests.rollout.router.stub_engine import Hold, die_within_body, hold_then_reply, reply, stream

LOST = [
    BackendState.DEAD,
    BackendState.FENCED,
    None,
]


def pushed(bench, index, state):
    return [] if state is None else [bench.member(index, state=state)]


async def test_engines_are_added_and_removed_under_load_and_no_request_is_lost(make_bench):
    bench = await make_bench(*[reply(b"ok")] * 6)
    is_finished = False
    statuses: list[int] = []

    async def load():
        while not is_finished:
            statuses.append((await bench.ask()).status)

    loads = [asyncio.ensure_future(load()) for _ in range(16)]
    rng = random.Random(5)
    for epoch in range(2, 60):
        serving = set(rng.sample(range(6), rng.randint(1, 5)))
        others = [
            BackendState.DRAINING,
            BackendState.FENCED,
            BackendState.ASLEEP,
            BackendState.DEAD,
        ]
        states = [
            BackendState.SERVING if index in serving else rng.choice(others) for index in range(6)
        ]
        members = [
            bench.member(index, state=state)
            for index, state in enumerate(states)
            if index in serving or rng.random() < 0.7
        ]
        assert await bench.host.set_members(epoch, members)
        seen = len(statuses)
        while len(statuses) < seen + 20:
            await bench.host.stats()
    is_finished = True
    await asyncio.gather(*loads)
    assert set(statuses) == {200}
    assert len(statuses) > 1000
    assert bench.failures == []


@pytest.mark.parametrize("state", LOST)
async def test_a_request_on_an_engine_pushed_as_lost_goes_to_another_at_once(make_bench, state):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold), reply(b"other"))
    await bench.host.set_members(2, [bench.member(0)])
    pending = bench.begin()
    await hold.entered.wait()
    await bench.host.set_members(3, [*pushed(bench, 0, state), bench.member(1)])
    assert (await pending).body == b"other"
    await asyncio.wait_for(bench.engines[0].peer_closed.wait(), 2)
    stats = await bench.host.stats()
    assert (stats["num_cut"], stats["num_retried"], stats["num_engine_failures"]) == (1, 1, 0)
    first, second = (engine.seen[0].json["rid"] for engine in bench.engines)
    assert first != second


@pytest.mark.parametrize("state", LOST)
async def test_with_no_other_engine_it_is_a_502_that_names_the_lost_one(make_bench, state):
    bench, _, pending = await hold_one(make_bench)
    await bench.host.set_members(2, pushed(bench, 0, state))
    got = await pending
    assert (got.status, got.json["error"]["engine"]) == (502, "e-0")


async def test_a_stream_on_an_engine_pushed_as_dead_ends_with_an_error_event(make_bench):
    hold = Hold()
    bench = await make_bench(stream(b"data: 1\n\n", hold))
    async with bench.client.post("/generate", json={}) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        await bench.host.set_members(2, [bench.member(0, state=BackendState.DEAD, reason="oom")])
        assert b"is dead (oom)" in await response.content.read()


async def test_a_begun_body_on_an_engine_pushed_as_dead_is_cut(make_bench):
    bench = await make_bench(die_within_body(Hold()))
    response = await bench.client.post("/generate", json={})
    await bench.host.set_members(2, [])
    with pytest.raises(Exception, match=r"not completed|not enough data|closed"):
        await response.read()


async def test_an_evicted_request_waits_while_the_gate_holds_and_continues_after(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold), reply(b"other"))
    await bench.host.set_members(2, [bench.member(0)])
    pending = bench.begin()
    await hold.entered.wait()
    await bench.host.set_gate("holding")
    await bench.host.set_members(3, [bench.member(0, state=BackendState.FENCED), bench.member(1)])
    await bench.wait_until_held(1)
    await bench.host.set_gate("open", weight_version=8)
    got = await pending
    assert (got.body, got.headers["x-weight-version"]) == (b"other", "8")


@pytest.mark.parametrize("state", [BackendState.DRAINING, BackendState.ASLEEP])
async def test_a_draining_or_sleeping_engine_finishes_what_it_has(make_bench, state):
    bench, hold, pending = await hold_one(make_bench)
    await bench.host.set_members(2, [bench.member(0, state=state)])
    hold.opened.set()
    assert (await pending).status == 200
