"""No client gets a token that does not fulfil its contract, whatever happens to the engines."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.router.proxy.exchange import Exchange
from tests.rollout.router.pushed_rig import PushedRig, versions_in, why_broken

EXACT, MIN, LAG = "weight_version", "min_weight_version", "max_version_lag"
PATHS = ("/generate", "/v1/completions")


@pytest.mark.parametrize("in_body", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_request_waits_for_the_push(path: str, stream: bool, in_body: bool) -> None:
    world = PushedRig()
    asked = world.ask(path=path, stream=stream, in_body=in_body, min_weight_version=2)
    assert not world.rig.engines.sent
    other = world.ask()
    world.run_all()
    assert other.client.status == 200
    world.push()
    world.run_all()
    assert [versions_in(ids) for ids in asked.ids()] == [[2] * 4]
    assert MIN not in world.rig.engines.sent[-1].body
    assert world.rig.is_empty()


def test_a_version_that_does_not_come_is_a_409_with_the_one_there_is() -> None:
    world = PushedRig()
    asked = world.ask(min_weight_version=2)
    world.time_out()
    assert (asked.client.status, asked.client.end) == (409, "finished")
    assert asked.error is not None
    assert (asked.error["type"], asked.error["weight_version"]) == ("weight_version", 1)
    past = world.ask(weight_version=0)
    assert (past.client.status, past.error and past.error["type"]) == (409, "weight_version")
    assert world.rig.proxy.counts.num_contracts_refused == {"late": 1, "past": 1}
    assert world.rig.is_empty()


def test_a_contract_that_is_none_is_a_400() -> None:
    world = PushedRig()
    asked = world.ask(in_body=True, weight_version=1, min_weight_version=1)
    assert len(world.rig.engines.sent) == 1
    world.run_all()
    assert asked.client.status == 200


@pytest.mark.parametrize("drain", ["abort", "retract", "finish"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reports", ["spans", "end"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("is_late", [False, True], ids=["ends open", "ends holding"])
@pytest.mark.parametrize("contract", [{EXACT: 1}, {LAG: 0}, {MIN: 1}, {LAG: 1}])
def test_a_push_in_the_middle_breaks_no_contract(
    contract: dict[str, int],
    is_late: bool,
    has_tokens: bool,
    path: str,
    reports: str,
    stream: bool,
    drain: str,
) -> None:
    world = PushedRig(reports=reports, num=1)
    asked = world.ask(path=path, stream=stream, **contract)
    if has_tokens:
        world.tokens(2)
    world.push(drain, between=world.run_all if is_late else lambda: None)
    world.run_all()
    assert asked.client.end == "finished"
    assert why_broken(asked) == ""
    is_met = asked.client.status == 200 and asked.error is None
    if MIN in contract or contract == {LAG: 1} or not stream or not has_tokens:
        # What was not shown starts over, so only an exact version that is past ends it.
        assert is_met == (EXACT not in contract or (drain == "finish" and path == "/generate"))
    elif drain == "finish":
        assert is_met == (EXACT not in contract or path == "/generate")
    if not is_met:
        assert asked.error is not None
        assert asked.error["type"] == "weight_version"
    assert world.rig.is_empty()


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_engine_and_a_push_leave_no_tokens_that_lag(stream: bool) -> None:
    world = PushedRig(num=2)
    asked = world.ask(stream=stream, num=6, max_version_lag=1)
    world.tokens(2)
    (place,) = [place for place, one in enumerate(world.engines) if one.live]
    world.hold()
    world.kill(place)
    world.pause("abort")
    world.write(2)
    world.go_on()
    world.open()
    world.run_all()
    if stream:
        assert asked.error is not None
        assert asked.error["type"] == "weight_version"
        assert [versions_in(ids) for ids in asked.ids()] == [[1, 1]]
    else:
        assert [versions_in(ids) for ids in asked.ids()] == [[3] * 6]
    assert world.rig.is_empty()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("contract", [{EXACT: 1}, {LAG: 0}])
def test_several_completions_are_checked_too(contract: dict[str, int], stream: bool) -> None:
    world = PushedRig(num=1)
    asked = world.ask(completions=2, stream=stream, **contract)
    world.tokens()
    world.push("retract")
    world.run_all()
    assert why_broken(asked) == ""
    assert asked.error is None if LAG in contract and not stream else asked.error is not None
    calm = world.ask(completions=2, stream=stream, weight_version=2)
    world.run_all()
    assert [versions_in(ids) for ids in calm.ids()] == [[2] * 4] * 2


def test_a_reply_names_the_versions_of_its_first_and_last_token() -> None:
    for stream in (False, True):
        world = PushedRig(num=1)
        asked = world.ask(min_weight_version=1, stream=stream)
        world.tokens(2)
        world.push("retract")
        world.run_all()
        head = asked.client.data.partition(b"\r\n\r\n")[0]
        assert b"x-first-weight-version: 1\r\n" in head
        assert (b"x-weight-version: 2\r\n" in head) == (
            not stream
        )  # it is sent before the last one


def test_a_request_that_each_push_breaks_ends() -> None:
    world = PushedRig(num=1)
    asked = world.ask(max_version_lag=0)
    for _ in range(20):
        world.tokens(2)
        world.push("retract")
        if asked.client.end:
            break
    assert (asked.client.status, asked.client.end) == (409, "finished")
    assert world.rig.is_empty()


DRAINS = ("abort", "retract", "finish")


def explore(seed: int, num_steps: int) -> dict[str, int]:
    """Random steps; each client's end is judged.  Returns how the requests ended."""
    chance = random.Random(seed)
    world = PushedRig(seed, reports=chance.choice(("spans", "end")))
    stages: list[Any] = []
    ends: dict[str, int] = {}
    for _ in range(num_steps):
        step = chance.choices(
            ("ask", "tokens", "push", "kill", "revive", "leave", "time_out"),
            (6, 20, 6, 1, 2, 1, 0.3),
        )[0]
        if step == "ask":
            world.ask(**_wish(chance, world.served))
        elif step == "tokens":
            world.tokens(chance.randint(1, 4))
        elif step == "push" and stages:
            stages.pop(0)()
        elif step == "push":
            drain, num = chance.choice(DRAINS), chance.choice((0, 1, 1, 2))
            stages = [
                world.hold,
                lambda drain=drain: world.pause(drain),
                lambda num=num: world.write(num),
                world.go_on,
                world.open,
            ]
        elif step == "kill" and sum(not one.is_dead for one in world.engines) > 1:
            world.kill(chance.randrange(len(world.engines)))
        elif step == "revive" and not stages:
            for place, engine in enumerate(world.engines):
                if engine.is_dead:
                    world.revive(place)
        elif step == "leave" and world.asked:
            world.leave(chance.choice(world.asked))
        elif step == "time_out":
            world.time_out()
        _judge(world, ends)
    for stage in stages:
        stage()
    for place in range(len(world.engines)):
        world.revive(place)
    world.open()
    world.run_all()
    world.time_out()
    _judge(world, ends)
    assert not world.asked
    assert world.rig.is_empty()
    return ends


def _wish(chance: random.Random, served: int) -> dict[str, Any]:
    wish: dict[str, Any] = {"stream": chance.random() < 0.5, "num": chance.randint(1, 12)}
    wish["path"] = chance.choice(PATHS)
    if wish["path"] == "/generate" and chance.random() < 0.2:
        wish["completions"] = 2
    wish["in_body"] = chance.random() < 0.3
    near = chance.randint(max(0, served - 1), served + 2)
    kind = chance.choice(("", MIN, EXACT, LAG, "both"))
    if kind in (MIN, EXACT):
        wish[kind] = near
    elif kind == LAG:
        wish[LAG] = chance.randint(0, 2)
    elif kind == "both":
        wish |= {MIN: near, LAG: chance.randint(0, 2)}
    return wish


def _judge(world: PushedRig, ends: dict[str, int]) -> None:
    """Judge what has ended, and forget it."""
    for asked in [one for one in world.asked if one.client.end or one.has_left]:
        world.asked.remove(asked)
        if asked.has_left:
            continue
        if asked.client.end == "cut":
            assert not asked.contract.has_versions
            ends["cut"] = ends.get("cut", 0) + 1
            continue
        assert why_broken(asked) == ""
        error = asked.error
        how = "whole" if error is None else str(error["type"])
        ends[how] = ends.get(how, 0) + 1
        assert how != "router_error"
        if how == "weight_version":
            assert asked.contract.has_versions
            assert isinstance(error, dict)
            if asked.contract.least is not None and asked.contract.max_version_lag is None:
                is_exact = asked.contract.weight_version is not None
                assert is_exact or "was not served within" in error["message"]


@pytest.mark.parametrize("seed", range(4))
def test_1000_random_pushes_kills_and_requests_break_no_contract(seed: int) -> None:
    ends = explore(seed, 1000)
    assert ends["whole"] > 50
    assert ends["weight_version"] > 10


@given(st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_nor_do_short_runs(seed: int) -> None:
    explore(seed, 60)


def test_the_world_finds_a_router_that_does_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exchange, "_why_broken", lambda self, generation, versions: "")
    with pytest.raises(AssertionError, match="a token has weight version"):
        explore(0, 1000)


def test_a_409_names_the_version_that_engines_have_before_the_gate_opens() -> None:
    world = PushedRig(num=1)
    asked = world.ask(weight_version=1)
    world.tokens(2)
    world.push("retract", between=world.run_all)
    assert asked.error is not None
    assert asked.error["weight_version"] == 2
