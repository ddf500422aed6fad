"""A broadcast from the groups' side, over fakes: which requests are sent, in which order.

What the trainer's end does with real engines is in ``tests/end_to_end/test_transports.py``.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from engines.fake import FakeEngine
from engines.protocol.errors import EngineRejected, EngineUnreachable
from rollout.core.errors import WeightsUnavailable
from rollout.core.fanout import EngineReply
from rollout.weights.push.stream_server import PushStreamServer, StreamedBucket
from rollout.weights.push.weight_push import PushTarget, WeightPush, push_weights
from rollout.weights.routes.broadcast import ByBroadcast
from rollout.weights.routes.route import BroadcastMember
from tests.support.builders import manifest
from tests.support.vllm_stub.stub import StubVllm
from tests.support.vllm_stub.wire import connect_to_stub


def a_push(server: PushStreamServer, version: int = 1) -> WeightPush:
    return WeightPush(version, manifest(), route=ByBroadcast(), stream=server.address)


def a_server(**terms: Any) -> PushStreamServer:
    info = manifest().tensors.values()
    group = {"group_name": "g", "backend": "gloo", "is_new": True, "keeps": False, "over": ""}
    group |= {"master_address": "127.0.0.1", "master_port": 1, "world_size": 4, **terms}
    payload = {
        "group_name": group["group_name"],
        "names": [spec.name for spec in info],
        "dtypes": [spec.dtype for spec in info],
        "shapes": [list(spec.shape) for spec in info],
        "load_format": "flattened_bucket",
    }
    return PushStreamServer(iter([StreamedBucket(payload, True)]), terms=lambda _: group)


class Recording(FakeEngine):
    async def init_weights_update_group(self, **where: Any) -> None:
        self.where = where
        await super().init_weights_update_group(**where)


async def test_each_engine_gets_its_ranks_and_leaves_in_the_end() -> None:
    server = a_server()
    one, other = Recording("a"), Recording("b")
    targets = {"a": PushTarget(one, payload_copies=2), "b": PushTarget(other)}
    answers = await push_weights(a_push(server), targets, budget_s=20)
    assert all(answer.failure is None for answer in answers.values())
    assert (one.where["rank_offset"], other.where["rank_offset"]) == (1, 3)
    assert one.operations() == [
        "weight_version",
        "init_weights_update_group",
        "begin_weight_update",
        "update_weight_version",
        "update_weights_from_distributed",
        "end_weight_update",
        "destroy_weights_update_group",
    ]
    assert await one.weight_version() == "1"
    server.close()


async def test_vllm_engines_get_the_same_calls() -> None:
    server = a_server()
    engine = StubVllm()
    targets = {"a": PushTarget(connect_to_stub(engine))}
    answers = await push_weights(a_push(server, 4), targets, budget_s=20)
    assert answers["a"].failure is None
    assert [one for one in engine.operations() if "group" in one or "update" in one] == [
        "init_weights_update_group",
        "begin_weight_update",
        "update_weight_version",
        "update_weights_from_distributed",
        "end_weight_update",
        "destroy_weights_update_group",
    ]
    assert engine.groups == set()
    assert await targets["a"].engine.weight_version() == "4"
    server.close()


async def test_an_engine_that_does_not_answer_is_left_out_before_a_group_is_made() -> None:
    server = a_server()
    dead, well = Recording("a"), Recording("b")
    dead.die("killed")
    targets = {"a": PushTarget(dead), "b": PushTarget(well)}
    answers = await push_weights(a_push(server), targets, budget_s=20)
    assert answers["a"].failure is not None
    assert answers["b"].failure is None
    assert well.where["rank_offset"] == 1
    server.close()


async def test_a_group_that_does_not_form_changes_nothing() -> None:
    server = a_server()
    bad, good = Recording("a"), Recording("b")
    bad.fail_next("init_weights_update_group", EngineRejected("no peer", status=400))
    begun: list[None] = []
    with pytest.raises(WeightsUnavailable, match=r"did not form: .*no peer.*no engine's weights"):
        await push_weights(
            a_push(server),
            {"a": PushTarget(bad), "b": PushTarget(good)},
            budget_s=20,
            on_begin=lambda: begun.append(None),
        )
    assert begun == []
    assert "begin_weight_update" not in good.operations()
    assert good.operations()[-1] == "destroy_weights_update_group"
    server.close()


async def test_no_engine_is_asked_for_anything_when_a_group_stays_away() -> None:
    server = a_server()
    server._gather_s = 0.2
    engine = Recording("a")
    push = a_push(server).read_by(2)
    with pytest.raises(WeightsUnavailable, match="1 of 2 groups connected"):
        await asyncio.wait_for(push_weights(push, {"a": PushTarget(engine)}, budget_s=20), 10)
    assert engine.operations() == ["weight_version"]
    server.close()


# -- groups that are kept ------------------------------------------------------------------------

JOINS = {"init_weights_update_group", "destroy_weights_update_group"}


def joins_of(engine: FakeEngine) -> list[str]:
    return [operation for operation in engine.operations() if operation in JOINS]


async def pushed(
    engines: Sequence[FakeEngine], held: dict[str, str], version: int, **terms: Any
) -> dict[str, EngineReply[None]]:
    server = a_server(**terms)
    try:
        targets = {engine.engine_id: PushTarget(engine, process="same") for engine in engines}
        return await push_weights(a_push(server, version), targets, budget_s=20, groups=held)
    finally:
        server.close()


async def test_a_kept_group_is_joined_once_and_used_again() -> None:
    engines = [Recording("a"), Recording("b")]
    held: dict[str, str] = {}
    await pushed(engines, held, 1, keeps=True)
    assert held == {"a": "g", "b": "g"}
    await pushed(engines, held, 2, keeps=True, is_new=False)
    assert held == {"a": "g", "b": "g"}
    for engine in engines:
        assert joins_of(engine) == ["init_weights_update_group"]
        assert await engine.weight_version() == "2"


async def test_an_engine_leaves_what_it_held_before_it_joins_another() -> None:
    engine = Recording("a")
    held: dict[str, str] = {}
    await pushed([engine], held, 1, keeps=True)
    await pushed([engine], held, 2, keeps=True, group_name="h", over="g")
    assert held == {"a": "h"}
    assert engine.groups == {"h"}
    assert len(joins_of(engine)) == 3


async def test_an_engine_whose_group_actor_was_lost_is_told_what_is_over() -> None:
    """Only the trainer still knows its groups."""
    engine = Recording("a")
    await pushed([engine], {}, 1, keeps=True)
    held: dict[str, str] = {}
    await pushed([engine], held, 2, group_name="h", over="g")
    assert engine.groups == frozenset()
    assert held == {}


async def test_after_a_failure_all_leave_and_nothing_is_kept() -> None:
    bad, good = Recording("a"), Recording("b")
    held: dict[str, str] = {}
    await pushed([bad, good], held, 1, keeps=True)
    bad.fail_next("update_weights_from_distributed", EngineRejected("no", status=400))
    answers = await pushed([bad, good], held, 2, keeps=True, is_new=False)
    assert answers["a"].failure is not None
    assert answers["b"].failure is None
    assert held == {}
    assert bad.groups == good.groups == frozenset()


async def test_an_engine_that_ends_its_session_badly_is_in_no_group() -> None:
    bad, good = Recording("a"), Recording("b")
    held: dict[str, str] = {}
    bad.fail_next("end_weight_update", EngineRejected("no", status=400))
    await pushed([bad, good], held, 1, keeps=True)
    assert held == {}
    assert good.groups == frozenset()


async def test_what_a_silent_engine_holds_is_remembered_for_when_it_comes_back() -> None:
    engine, other = Recording("a"), Recording("b")
    held: dict[str, str] = {}
    await pushed([engine, other], held, 1, keeps=True)
    engine.fail_next("weight_version", EngineUnreachable("nobody answers"))
    await pushed([engine, other], held, 2, keeps=True, group_name="h", over="g")
    assert held == {"a": "g", "b": "h"}
    assert (engine.groups, other.groups) == ({"g"}, {"h"})
    await pushed([engine, other], held, 3, keeps=True, group_name="i", over="h")
    assert held == {"a": "i", "b": "i"}
    assert engine.groups == other.groups == {"i"}


async def test_an_engine_that_says_it_has_left_holds_nothing() -> None:
    engine = Recording("a", reports_released=True)
    held = {"a": "g"}
    joined: list[BroadcastMember] = []
    server = a_server()
    terms = server._terms_of
    server._terms_of = lambda members: joined.extend(members) or terms(members)  # type: ignore[func-returns-value]
    target = PushTarget(engine, process="same", reports_groups=True)
    await push_weights(a_push(server), {"a": target}, budget_s=20, groups=held)
    assert joined == [BroadcastMember("a", 1, "same", "")]
    assert engine.operations()[:3] == ["weight_version", "server_info", "init_weights_update_group"]
    server.close()


async def test_engines_say_who_they_are_and_what_they_hold() -> None:
    joined: list[Any] = []
    server = a_server()
    terms = server._terms_of
    server._terms_of = lambda members: joined.extend(members) or terms(members)  # type: ignore[func-returns-value]
    target = PushTarget(Recording("a"), payload_copies=2, process="boot/7/99")
    await push_weights(a_push(server), {"a": target}, budget_s=20, groups={"a": "former"})
    assert joined == [BroadcastMember("a", 2, "boot/7/99", "former")]
    server.close()
