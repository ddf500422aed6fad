"""One server over fake engines: barriers between phases, and a gate that fails closed."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine
from engines.protocol import Endpoint, MemoryTag, WorkerType
from engines.protocol.errors import EngineNotReady, EngineUnreachable
from rollout.control.server import server as server_module
from rollout.control.server.gate_control import may_return, member
from rollout.core.errors import ConfigError, LifecycleError, PhaseFailed, WeightMismatch
from rollout.core.types import EngineStatus
from rollout.rules.lifecycle import Command, Phase
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.weight_push import WeightPush
from tests.support.builders import (
    TENSOR_NAMES,
    ServerBench,
    make_server,
    manifest,
    push,
    started_server,
)
from tests.support.virtual_time import virtual_time

RAISE = {"on_failure": "raise"}
BROKEN = EngineUnreachable("connection broke")


async def settle() -> None:
    """Let what was started get as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)


def engines_that_got(bench: ServerBench, operation: str) -> set[str]:
    return {engine.engine_id for engine in bench.engines if operation in engine.operations()}


async def phases(bench: ServerBench) -> dict[str, str]:
    return {group.name: group.phase for group in (await bench.server.status()).groups}


ALL = {"shared-0", "shared-1", "apart-0"}
SHARED = {"shared-0", "shared-1"}


# -- barriers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "next_one"),
    [
        ("pause_generation", "flush_cache"),
        ("flush_cache", "release_memory_occupation"),
    ],
)
@pytest.mark.parametrize("slow", sorted(ALL))
async def test_no_engine_is_further_than_the_slowest_of_all_groups_on_the_way_down(
    tmp_path: Path, held: str, next_one: str, slow: str
) -> None:
    bench = await started_server(tmp_path)
    gate = bench[slow].hold(held)
    offloading = asyncio.create_task(bench.server.offload())
    await gate.entered.wait()
    await settle()
    assert engines_that_got(bench, held) == ALL
    assert engines_that_got(bench, next_one) == set()
    gate.open()
    await offloading
    assert engines_that_got(bench, "release_memory_occupation") == SHARED


@pytest.mark.parametrize(
    ("held", "next_one", "num_before"),
    [
        ("resume_memory_occupation", "begin_weight_update", 0),
        ("update_weights_from_tensor", "weight_version", 0),
        ("weight_version", "resume_memory_occupation", 1),
    ],
)
async def test_no_engine_is_further_than_the_slowest_of_all_groups_on_the_way_up(
    tmp_path: Path, held: str, next_one: str, num_before: int
) -> None:
    bench = await started_server(tmp_path)
    await bench.server.offload()
    for engine in bench.engines:
        engine.calls.clear()
    gate = bench["shared-1"].hold(held)
    onloading = asyncio.create_task(bench.server.push(push(1)))
    await gate.entered.wait()
    await settle()
    assert bench["shared-0"].operations().count(next_one) == num_before
    gate.open()
    await onloading
    assert bench["shared-0"].operations().count(next_one) > num_before


async def test_nothing_continues_before_every_kv_cache_is_back(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    await bench.server.offload()
    await bench.server.run(Command.ONLOAD_WEIGHTS)
    await bench.server.update_weights(push(1))
    gate = bench["shared-1"].hold("resume_memory_occupation")
    onloading = asyncio.create_task(bench.server.serve())
    await gate.entered.wait()
    await settle()
    assert engines_that_got(bench, "continue_generation") == set()
    gate.open()
    await onloading
    assert engines_that_got(bench, "continue_generation") == ALL


async def test_the_release_of_one_group_starts_only_after_every_group_has_flushed(
    tmp_path: Path,
) -> None:
    bench = await started_server(tmp_path)
    gate = bench["apart-0"].hold("flush_cache")
    offloading = asyncio.create_task(bench.server.offload())
    await gate.entered.wait()
    await settle()
    assert all(not engine.released for engine in bench.engines)
    assert not offloading.done()
    gate.open()
    await offloading


async def test_a_group_that_keeps_its_gpus_goes_along_without_release_and_resume(
    tmp_path: Path,
) -> None:
    bench = await started_server(tmp_path)
    await bench.server.offload()
    await bench.server.push(push(1))
    assert bench["apart-0"].operations()[3:] == [
        "pause_generation",
        "flush_cache",
        "begin_weight_update",
        "update_weight_version",
        "update_weights_from_tensor",
        "end_weight_update",
        "weight_version",
        "weights_checker",
        "continue_generation",
    ]


async def test_a_step_by_hand_goes_the_same_way(tmp_path: Path) -> None:
    by_hand = await started_server(tmp_path)
    server = by_hand.server
    await server.run(Command.PAUSE_GENERATION)
    await server.run(Command.FLUSH_CACHE)
    await server.run(Command.RELEASE_MEMORY_OCCUPATION)
    await server.run(Command.ONLOAD_WEIGHTS)
    await server.update_weights(push(1))
    await server.run(Command.VERIFY)
    await server.run(Command.ONLOAD_KV)
    await server.run(Command.CONTINUE_GENERATION)
    at_once = await started_server(tmp_path)
    await at_once.server.offload()
    await at_once.server.push(push(1))
    for one, other in zip(by_hand.engines, at_once.engines, strict=True):
        assert one.operations() == other.operations()
    assert by_hand.router.gate == "open"


async def test_continue_by_hand_is_refused_before_the_kv_cache_is_back(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    await bench.server.offload()
    await bench.server.run(Command.ONLOAD_WEIGHTS)
    await bench.server.update_weights(push(1))
    await bench.server.run(Command.VERIFY)
    with pytest.raises(
        LifecycleError, match=r"cannot continue_generation while verified; .* onload_kv"
    ):
        await bench.server.run(Command.CONTINUE_GENERATION)
    assert bench.router.gate == "holding"  # a refused command ends no held request
    assert not any(engine.is_dead for engine in bench.engines)


async def test_the_reports_say_seconds_bytes_and_version(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    report = await bench.server.offload()
    assert list(report.phase_s) == ["pause_generation", "flush_cache", "release_memory_occupation"]
    assert report.freed_bytes == 6_000
    report = await bench.server.push(push(7))
    assert report.weight_version == 7
    assert list(report.phase_s) == [
        "onload_weights",
        "update_weights",
        "verify",
        "onload_kv",
        "continue_generation",
    ]


async def test_new_weights_for_serving_engines_release_nothing(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    await bench.server.push(push(1))
    assert engines_that_got(bench, "release_memory_occupation") == set()
    assert engines_that_got(bench, "resume_memory_occupation") == set()
    assert engines_that_got(bench, "continue_generation") == ALL
    assert bench.router.gates[-1] == {"state": "open", "weight_version": 1}


async def test_an_opened_gate_has_the_metrics_of_the_boundary_for_drivers(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    assert bench.router.metrics == {"server/restarts": 0.0, "server/weight_version": 0.0}
    reports = [await bench.server.offload(), await bench.server.push(push(1))]
    metrics = bench.router.metrics
    assert metrics["server/weight_version"] == 1.0
    phases = {name for report in reports for name in report.phase_s}
    assert {name for name in metrics if "phase_s" in name} == {
        f"server/phase_s/{name}" for name in phases
    }
    lost_s, trainer_s = metrics["server/lost_s"], metrics["server/trainer_s"]
    assert lost_s > 0 < trainer_s
    await bench.server.push(push(2))
    assert bench.router.metrics["server/trainer_s"] == 0.0


async def test_a_server_in_the_place_of_a_lost_one_keeps_the_metrics_until_its_first_step(
    tmp_path: Path,
) -> None:
    bench = await started_server(tmp_path)
    gate, last = bench.server._gate, bench.server._phase_runner._last_push
    # As ``rejoin`` reads them.
    bench.server._router.metrics = {"server/lost_s": 2.0, "server/restarts": 9.0}
    await gate.open(last, {})
    assert bench.router.metrics["server/lost_s"] == 2.0
    assert bench.router.metrics["server/restarts"] == 0.0  # which the tracker of this one counts
    await bench.server.offload()
    await bench.server.push(push(1))
    assert bench.router.metrics["server/lost_s"] != 2.0


# -- the gate -----------------------------------------------------------------------------------


async def test_the_gate_is_shut_before_the_first_engine_is_paused(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    gate_at_pause = []
    for engine in bench.engines:
        gate = engine.hold("pause_generation")
        asyncio.create_task(_remember(gate, bench, gate_at_pause))  # noqa: RUF006
    await bench.server.offload()
    assert gate_at_pause == ["holding"] * 3


async def _remember(gate: Any, bench: ServerBench, states: list[str]) -> None:
    await gate.entered.wait()
    states.append(bench.router.gate)
    gate.open()


async def test_no_engine_is_paused_when_the_gate_cannot_be_shut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await started_server(tmp_path)
    monkeypatch.setattr(bench.router, "set_gate", _fail)
    with pytest.raises(ConnectionError):
        await bench.server.offload()
    assert engines_that_got(bench, "pause_generation") == set()


async def test_a_gate_of_which_it_is_not_known_whether_it_was_shut_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await started_server(tmp_path)
    set_gate = bench.router.set_gate

    async def lose_reply(state: str, **why: Any) -> None:
        await set_gate(state, **why)
        monkeypatch.undo()
        raise ConnectionError("the reply is lost")

    monkeypatch.setattr(bench.router, "set_gate", lose_reply)
    with pytest.raises(ConnectionError):
        await bench.server.offload()
    assert bench.router.gates[-1]["state"] == (await bench.server.status()).gate == "closed"
    assert "the reply is lost" in bench.router.gates[-1]["reason"]
    await bench.server.serve()
    assert bench.router.gate == (await bench.server.status()).gate == "open"


async def test_what_fails_before_a_command_closes_the_gate_as_the_command_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await started_server(tmp_path)
    await bench.server.offload()

    async def fail(names: Any) -> None:
        raise PhaseFailed("no engine could be started", phase="onload_weights")

    monkeypatch.setattr(bench.server._recovery, "restart_if_short", fail)
    with pytest.raises(PhaseFailed, match="no engine could be started"):
        await bench.server.run(Command.ONLOAD_WEIGHTS)
    assert bench.router.gates[-1] == {
        "state": "closed",
        "reason": "no engine could be started",
        "phase": "onload_weights",
    }
    refreshed: list[str] = []
    monkeypatch.undo()
    refresh = bench.server._registry.refresh_phases
    monkeypatch.setattr(
        bench.server._registry, "refresh_phases", lambda: refreshed.append("yes") or refresh()
    )
    await bench.server.push(push(1))
    assert refreshed
    assert bench.router.gate == "open"


ENGINE = EngineStatus("a", Endpoint("127.0.0.1", 1), "serving", 3, (), "local")


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "serving"),
        ({"state": "paused"}, "serving"),
        ({"released": ("weights", "kv_cache")}, "asleep"),
        ({"released": ("cuda_graph",)}, "asleep"),
        ({"is_paused": True}, "draining"),
        ({"is_verified": False}, "draining"),
        ({"weight_version": None}, "draining"),
        ({"weight_version": 2}, "draining"),
        ({"is_stale": True, "is_paused": True}, "fenced"),
        ({"fence_reason": "it died", "released": ("weights",)}, "fenced"),
    ],
)
def test_only_an_engine_that_lacks_nothing_is_given_to_the_router_as_serving(
    change: dict[str, Any], state: str
) -> None:
    engine = replace(ENGINE, **change)
    made = member(WorkerType.REGULAR, engine, {}, 3)
    assert made.state == state
    assert bool(made.reason) == (state != "serving")
    # Recovery brings back what it has to restart or restore, and nothing that waits for a command.
    assert may_return(engine, {"a"}, 3) == (state in ("serving", "fenced"))


async def test_the_gate_does_not_open_over_engines_that_may_not_serve(tmp_path: Path) -> None:
    """Whatever the records of phases say."""
    bench = await started_server(tmp_path, {"main": {"num_engines": 1}})
    await bench.server.run(Command.PAUSE_GENERATION)
    (engine,) = bench.groups["main"]._engines.members()
    engine.released.add(MemoryTag.CUDA_GRAPH)
    bench.groups["main"]._commands.phase = Phase.SERVING
    with pytest.raises(PhaseFailed, match="no engine may serve: engine main-0: it has cuda_graph"):
        await bench.server.serve()
    assert bench.router.gate == "closed"
    assert bench.router.states == {"main-0": "asleep"}


async def _fail(*args: Any, **kwargs: Any) -> None:
    raise ConnectionError("the router is gone")


async def test_the_gate_opens_only_after_every_group_continued_with_the_new_version(
    tmp_path: Path,
) -> None:
    bench = await started_server(tmp_path)
    await bench.server.offload()
    gate = bench["apart-0"].hold("continue_generation")
    onloading = asyncio.create_task(bench.server.push(push(3)))
    await gate.entered.wait()
    await settle()
    assert bench["shared-0"].paused is None
    assert bench.router.gate == "holding"
    gate.open()
    await onloading
    assert bench.router.gates[-1] == {"state": "open", "weight_version": 3}


@pytest.mark.parametrize(
    ("operation", "during"),
    [
        ("pause_generation", "pause_generation"),
        ("flush_cache", "flush_cache"),
        ("release_memory_occupation", "release_memory_occupation"),
        ("resume_memory_occupation", "onload_weights"),
        ("begin_weight_update", "update_weights"),
        ("update_weights_from_tensor", "update_weights"),
        ("end_weight_update", "update_weights"),
        ("weight_version", "verify"),
        ("continue_generation", "continue_generation"),
    ],
)
async def test_the_gate_stays_shut_after_a_failure_and_says_why(
    tmp_path: Path, operation: str, during: str
) -> None:
    bench = await started_server(tmp_path, lifecycle=RAISE)
    bench["shared-1"].fail_next(operation, BROKEN)
    before = len(bench.router.gates)

    async def step() -> None:
        await bench.server.offload()
        await bench.server.push(push(1))

    with pytest.raises(PhaseFailed, match="engine shared-1") as caught:
        await step()
    assert "open" not in [gate["state"] for gate in bench.router.gates[before:]]
    assert bench.router.gates[-1] == {
        "state": "closed",
        "reason": str(caught.value),
        "phase": during,
    }
    states = dict(bench.router.states)
    assert states.pop("shared-1") == "fenced"
    # The others may generate nothing either, until a command leads on; all but those that do.
    generates = operation == "continue_generation"
    assert [state == "serving" for state in states.values()] == [generates, generates]
    assert (await bench.server.status()).gate == "closed"


async def test_a_router_that_fails_too_does_not_hide_what_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await started_server(tmp_path, lifecycle=RAISE)
    await bench.server.run(Command.PAUSE_GENERATION)
    bench["apart-0"].fail_next("flush_cache", BROKEN)
    monkeypatch.setattr(bench.router, "set_gate", _fail)
    with pytest.raises(PhaseFailed, match="engine apart-0: flush_cache failed"):
        await bench.server.run(Command.FLUSH_CACHE)
    assert await phases(bench) == {"shared": "flushed", "apart": "paused"}


async def test_a_command_refused_while_serving_leaves_the_gate_open(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    with pytest.raises(LifecycleError, match="cannot update_weights while serving"):
        await bench.server.update_weights(push(1))
    assert bench.router.gate == "open"


# -- an engine fails ----------------------------------------------------------------------------


async def test_an_engine_that_fails_is_fenced_in_the_membership_and_the_rest_goes_on(
    tmp_path: Path,
) -> None:
    bench = await started_server(tmp_path)
    bench["shared-0"].fail_next("pause_generation", BROKEN)
    await bench.server.offload()
    assert bench.router.states == {
        "shared-0": "fenced",
        "shared-1": "draining",
        "apart-0": "draining",
    }
    assert "connection broke" in bench.router.members[0].reason
    assert bench.router.members[1].reason == "its generation is paused"
    await bench.server.push(push(1))
    assert bench.router.gate == "open"
    assert bench.router.states == {
        "shared-0": "fenced",
        "shared-1": "serving",
        "apart-0": "serving",
    }
    assert bench.launcher.processes["shared-0"].num_kills == 1
    assert bench.router.epochs == sorted(set(bench.router.epochs))


@virtual_time
async def test_a_late_engine_is_named_with_operation_and_budget_at_the_gate(tmp_path: Path) -> None:
    lifecycle = RAISE | {"memory_timeout_s": 45}
    bench = await started_server(tmp_path, lifecycle=lifecycle)
    bench["shared-1"].hold("release_memory_occupation")
    with pytest.raises(PhaseFailed):
        await bench.server.offload()
    assert (
        "engine shared-1: release_memory_occupation took longer than 45 s"
        in bench.router.gates[-1]["reason"]
    )


async def test_an_offload_after_a_half_failure_goes_on_where_each_group_is(tmp_path: Path) -> None:
    groups = {
        "shared": {"num_engines": 2, "min_engines": 1},
        "apart": {"needs_offload": False, "min_engines": 0},
    }
    bench = await started_server(tmp_path, groups, lifecycle=RAISE)
    bench["shared-0"].fail_next("release_memory_occupation", BROKEN)
    with pytest.raises(PhaseFailed):
        await bench.server.offload()
    await bench.server.offload()
    assert await phases(bench) == {"shared": "offloaded", "apart": "flushed"}
    for engine_id in ("shared-1", "apart-0"):
        calls = bench[engine_id].operations()
        assert calls.count("pause_generation") == calls.count("flush_cache") == 1
    assert bench["shared-1"].operations().count("release_memory_occupation") == 1
    assert not bench["shared-1"].is_dead


async def test_an_onload_after_a_half_failed_offload_takes_the_memory_back_first(
    tmp_path: Path,
) -> None:
    groups = {"shared": {"num_engines": 2, "min_engines": 1}}
    bench = await started_server(tmp_path, groups, lifecycle=RAISE)
    bench["shared-0"].fail_next("release_memory_occupation", BROKEN)
    with pytest.raises(PhaseFailed):
        await bench.server.offload()
    with pytest.raises(LifecycleError, match="cannot serve while offloaded: the release disc"):
        await bench.server.serve()
    assert bench.router.gate == "closed"
    await bench.server.push(push(1))
    assert not bench["shared-1"].is_dead
    assert not bench["shared-1"].released
    assert bench.router.gate == "open"


async def test_a_command_that_only_one_group_refused_is_known_to_have_moved_the_other(
    tmp_path: Path,
) -> None:
    groups = {"shared": {"num_engines": 2, "min_engines": 1}, "apart": {"needs_offload": False}}
    bench = await started_server(tmp_path, groups, lifecycle=RAISE)
    bench["shared-0"].fail_next("release_memory_occupation", BROKEN)
    with pytest.raises(PhaseFailed):
        await bench.server.offload()
    with pytest.raises(LifecycleError, match="cannot continue_generation while offloaded"):
        await bench.server.run(Command.CONTINUE_GENERATION)
    assert bench["apart-0"].paused is None
    await bench.server.offload()
    assert bench["apart-0"].paused is not None
    await bench.server.push(push(1))
    assert bench.router.gates[-1] == {"state": "open", "weight_version": 1}


@pytest.mark.parametrize("failing", ["resume_memory_occupation", "continue_generation"])
async def test_an_onload_after_a_half_failure_goes_on_where_each_group_is(
    tmp_path: Path, failing: str
) -> None:
    groups = {
        "shared": {"num_engines": 2, "min_engines": 1},
        "apart": {"needs_offload": False},
    }
    bench = await started_server(tmp_path, groups, lifecycle=RAISE)
    await bench.server.offload()
    await bench.server.run(Command.ONLOAD_WEIGHTS)
    await bench.server.update_weights(push(1))
    bench["shared-0"].fail_next(failing, BROKEN)
    with pytest.raises(PhaseFailed):
        await bench.server.serve()
    await bench.server.serve()
    assert await phases(bench) == {"shared": "serving", "apart": "serving"}
    assert not bench["shared-1"].is_dead
    assert bench.router.gates[-1] == {"state": "open", "weight_version": 1}


# -- repeated, refused, cancelled ---------------------------------------------------------------


async def test_offload_and_onload_repeated_send_nothing(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)

    async def is_quiet(command: Callable[[], Any]) -> bool:
        before = [list(engine.calls) for engine in bench.engines]
        await command()
        return before == [engine.calls for engine in bench.engines]

    await bench.server.offload()
    assert await is_quiet(bench.server.offload)
    assert bench.router.gate == "holding"
    await bench.server.push(push(1))
    assert await is_quiet(bench.server.serve)
    assert bench.router.gate == "open"


@virtual_time
async def test_a_second_command_waits_and_is_told_for_whom_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "lock_timeout_s", lambda _: 5.0)
    bench = await started_server(tmp_path)
    gate = bench["shared-0"].hold("pause_generation")
    offloading = asyncio.create_task(bench.server.offload())
    await gate.entered.wait()
    assert (await bench.server.status()).lock_owner == "offload"
    message = "cannot push: offload has been running for 5 s"
    with pytest.raises(LifecycleError, match=message):
        await bench.server.push(push(1))
    gate.open()
    await offloading


async def test_a_cancelled_command_waits_for_its_engines_and_can_be_taken_up_again(
    tmp_path: Path,
) -> None:
    bench = await started_server(tmp_path)
    gate = bench["shared-0"].hold("release_memory_occupation")
    offloading = asyncio.create_task(bench.server.offload())
    await gate.entered.wait()
    offloading.cancel()
    await settle()
    assert not offloading.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await offloading
    assert bench.router.gates[-1]["reason"] == "release_memory_occupation was cancelled"
    assert bench["shared-0"].released == set(MemoryTag)
    await bench.server.push(push(1))
    assert bench.router.gate == "open"
    assert not any(engine.is_dead for engine in bench.engines)


# -- weights ------------------------------------------------------------------------------------


def wrong_shape() -> Manifest:
    tensors = dict(manifest().tensors)
    tensors["lm_head.weight"] = TensorSpec("lm_head.weight", "float32", (16, 9))
    return Manifest(tensors)


def wrong_name() -> Manifest:
    specs = [*manifest().tensors.values(), TensorSpec("lm_head.weights", "float32", (16, 8))]
    return Manifest.of(specs)


WRONG_PUSHES = {
    "lacks": (push(1, TENSOR_NAMES[:2]), "the push lacks 1 of 3 tensors, first 'lm_head.weight'"),
    "name": (
        WeightPush(1, wrong_name(), [b""]),
        r"no tensor 'lm_head\.weights'; did you mean 'lm_head\.weight'\?",
    ),
    "shape": (
        WeightPush(1, wrong_shape(), [b""]),
        r"has shape \[16, 9\], the model's is \[16, 8\]",
    ),
    "empty": (WeightPush(1, manifest(), []), "holds no tensors"),
    "version": (push(0), "weight version 0 is not newer than 0"),
}


@pytest.mark.parametrize("wrong", WRONG_PUSHES)
async def test_a_wrong_push_is_refused_before_anything_is_sent(tmp_path: Path, wrong: str) -> None:
    bench = await started_server(tmp_path)
    the_push, message = WRONG_PUSHES[wrong]
    before = [engine.operations() for engine in bench.engines]
    with pytest.raises(WeightMismatch, match=message):
        await bench.server.push(the_push)
    assert [engine.operations() for engine in bench.engines] == before
    assert bench.router.gate == "open"
    await bench.server.offload()
    with pytest.raises(WeightMismatch, match=message):
        await bench.server.push(the_push)
    assert engines_that_got(bench, "resume_memory_occupation") == set()


async def test_a_partial_push_may_lack_tensors_where_the_rest_survives(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, update="partial")
    await bench.server.offload()
    await bench.server.push(push(1, TENSOR_NAMES[:1]))
    assert not any(engine.weights_are_garbage for engine in bench.engines)
    assert bench.router.gate == "open"


async def test_what_is_not_pushed_comes_back_after_each_offload_as_it_was(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, not_pushed=["lm_head.*"])
    before = [engine.weights.digests["lm_head.weight"] for engine in bench.engines]
    for version in (1, 2):
        await bench.server.offload()
        await bench.server.push(push(version, TENSOR_NAMES[:2]))
        assert bench.router.gate == "open"
    assert [engine.weights.digests["lm_head.weight"] for engine in bench.engines] == before
    assert not any(engine.weights_are_garbage for engine in bench.engines)


async def test_what_is_not_pushed_and_changed_in_a_release_does_not_serve(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, not_pushed=["lm_head.*"])
    await bench.server.offload()
    for engine in bench.engines:
        engine.weights.garble()  # the first tensor by name: the head
    with pytest.raises(PhaseFailed, match=r"'lm_head\.weight' is not what it was before"):
        await bench.server.push(push(1, TENSOR_NAMES[:2]))
    assert bench.router.gate != "open"


async def test_a_push_of_what_is_said_not_to_be_pushed_is_refused(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, not_pushed=["lm_head.*"])
    with pytest.raises(WeightMismatch, match=r"'lm_head\.weight' is pushed, and weights\.not_pu"):
        await bench.server.push(push(1))
    with pytest.raises(WeightMismatch, match="lacks 1 of 3 tensors"):
        await bench.server.push(push(1, TENSOR_NAMES[:1]))
    assert bench.router.gate == "open"


async def test_weight_versions_must_grow(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    await bench.server.push(push(5))
    for version in (4, 5):
        with pytest.raises(WeightMismatch, match=f"{version} is not newer than 5"):
            await bench.server.push(push(version))
    await bench.server.push(push(6))


async def test_full_weights_do_not_serve_again_without_a_push(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    await bench.server.offload()
    with pytest.raises(
        LifecycleError, match=r"group shared, and nothing keeps weight version 0; so"
    ):
        await bench.server.serve()
    assert (await phases(bench))["shared"] == "offloaded"
    assert engines_that_got(bench, "resume_memory_occupation") == set()
    assert engines_that_got(bench, "continue_generation") == set()
    assert bench.router.gate == "holding"
    await bench.server.push(push(1))
    assert not any(engine.weights_are_garbage for engine in bench.engines)
    assert bench.router.gate == "open"


async def test_a_frozen_server_comes_back_as_it_was_and_takes_no_push(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, update="frozen")
    before = [engine.weights.checksum() for engine in bench.engines]
    with pytest.raises(WeightMismatch, match="server policy is frozen"):
        await bench.server.push(push(1))
    await bench.server.offload()
    await bench.server.serve()
    assert [engine.weights.checksum() for engine in bench.engines] == before
    assert bench.router.gate == "open"


async def test_a_push_that_fails_on_one_group_is_repeated_with_the_same_version(
    tmp_path: Path,
) -> None:
    groups = {"shared": {"num_engines": 2, "min_engines": 1}, "apart": {"needs_offload": False}}
    bench = await started_server(tmp_path, groups, lifecycle=RAISE)
    await bench.server.offload()
    bench["shared-0"].fail_next("update_weights_from_tensor", BROKEN)
    with pytest.raises(PhaseFailed):
        await bench.server.push(push(1))
    assert await phases(bench) == {"shared": "weights_updated", "apart": "weights_updated"}
    assert (await bench.server.status()).weight_version == 0
    await bench.server.push(push(1))
    assert bench.router.gates[-1] == {"state": "open", "weight_version": 1}


async def test_an_onload_without_the_push_that_failed_kills_nobody(tmp_path: Path) -> None:
    groups = {"shared": {"num_engines": 2, "min_engines": 1}, "apart": {"needs_offload": False}}
    bench = await started_server(tmp_path, groups, lifecycle=RAISE)
    await bench.server.offload()
    bench["shared-0"].fail_next("update_weights_from_tensor", BROKEN)
    with pytest.raises(PhaseFailed):
        await bench.server.push(push(1))
    with pytest.raises(LifecycleError):
        await bench.server.serve()
    assert [engine.engine_id for engine in bench.engines if engine.is_dead] == ["shared-0"]
    assert bench.router.gate == "closed"


# -- start and stop -----------------------------------------------------------------------------


async def test_a_server_serves_when_it_has_started(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    status = await bench.server.status()
    assert (status.phase, status.gate, status.weight_version) == ("serving", "open", 0)
    assert status.router_url == "http://127.0.0.1:30000"
    assert bench.router.states == dict.fromkeys(bench.router.states, "serving")
    expected = await bench.server.expected_manifest()
    assert expected == manifest()


async def test_a_start_that_fails_stops_router_and_engines(tmp_path: Path) -> None:
    bench = make_server(tmp_path)
    bench.launcher.fail_next("apart-0", EngineNotReady("exited with status 1"))
    with pytest.raises(PhaseFailed, match="exited with status 1"):
        await bench.server.start()
    assert sorted(bench.launcher.processes) == ["shared-0", "shared-1"]
    assert all(process.is_stopped for process in bench.launcher.processes.values())
    assert bench.router.num_stops == 1
    assert "open" not in [gate["state"] for gate in bench.router.gates]


async def test_a_port_that_is_taken_is_known_before_an_engine_is_launched(tmp_path: Path) -> None:
    bench = make_server(tmp_path)
    bench.router.start_error = ConfigError("port 30000 is taken")
    with pytest.raises(ConfigError, match="port 30000"):
        await bench.server.start()
    assert bench.launcher.specs == []


async def test_a_cancelled_start_leaves_nothing_running(tmp_path: Path) -> None:
    bench = make_server(tmp_path)
    gate = bench.launcher.hold("apart-0")
    starting = asyncio.create_task(bench.server.start())
    await gate.entered.wait()
    starting.cancel()
    await settle()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert len(bench.launcher.processes) == 3
    assert all(process.is_stopped for process in bench.launcher.processes.values())


async def test_a_server_that_starts_says_so_from_the_first_moment(tmp_path: Path) -> None:
    bench = make_server(tmp_path)
    before = await bench.server.status()
    gate = bench.launcher.hold("apart-0")
    starting = asyncio.create_task(bench.server.start())
    await gate.entered.wait()
    await settle()
    during = await bench.server.status()
    for status in (before, during):
        assert (status.phase, status.gate) == ("starting", "closed")
    assert await phases(bench) == {"shared": "serving", "apart": "starting"}
    with pytest.raises(
        LifecycleError, match="cannot pause_generation while starting; legal now: nothing"
    ):
        await bench.groups["apart"].run(Command.PAUSE_GENERATION)
    gate.open()
    started = await starting
    assert (started.phase, started.gate) == ("serving", "open")


async def test_engines_that_start_at_another_version_are_refused(tmp_path: Path) -> None:
    bench = make_server(tmp_path)
    bench.launcher._make = lambda spec, endpoint: FakeEngine(
        spec.engine_id, endpoint=endpoint, weight_version="default"
    )
    with pytest.raises(WeightMismatch, match="starts at weight version None, not 0"):
        await bench.server.start()
    assert all(process.is_stopped for process in bench.launcher.processes.values())


async def test_stop_works_while_a_command_hangs(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    gate = bench["shared-0"].hold("pause_generation")
    offloading = asyncio.create_task(bench.server.offload())
    await gate.entered.wait()
    await bench.server.stop()
    assert all(process.is_stopped for process in bench.launcher.processes.values())
    with pytest.raises(PhaseFailed, match="the group was stopped"):
        await offloading


async def test_a_command_after_the_stop_says_that_it_was_one(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    gate = bench["shared-0"].hold("pause_generation")
    offloading = asyncio.create_task(bench.server.offload())
    await gate.entered.wait()
    waiting = asyncio.create_task(bench.server.push(push(1)))
    await asyncio.sleep(0)
    await bench.server.stop()
    with pytest.raises(PhaseFailed, match="the group was stopped"):
        await offloading
    with pytest.raises(LifecycleError, match=r"cannot push: server .* was stopped, by its"):
        await waiting
    with pytest.raises(LifecycleError, match=r"cannot offload: .*or by rollout stop; launch it"):
        await bench.server.offload()


async def test_engines_are_stopped_even_when_the_router_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await started_server(tmp_path)
    monkeypatch.setattr(bench.router, "stop", _fail)
    await bench.server.stop()
    assert all(process.is_stopped for process in bench.launcher.processes.values())


# -- found by the explorer (tests/explore) ------------------------------------------------------


async def test_new_weights_reach_groups_that_were_only_paused(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    await bench.server.run(Command.PAUSE_GENERATION)
    await bench.server.push(push(1))
    assert bench.router.gates[-1] == {"state": "open", "weight_version": 1}
    assert bench["shared-0"].operations().count("flush_cache") == 1


async def test_an_offload_is_not_done_while_a_fenced_engine_may_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await started_server(tmp_path)
    process = bench.launcher.processes["shared-0"]

    async def fail() -> None:
        raise OSError("the guard is gone")

    monkeypatch.setattr(process, "kill", fail)
    bench["shared-0"].lose_next_answer("pause_generation")
    with pytest.raises(PhaseFailed, match=r"shared-0.*its memory may not be free"):
        await bench.server.offload()
    monkeypatch.undo()
    await bench.server.offload()
    assert bench["shared-0"].is_dead


async def test_the_error_of_one_group_says_whom_another_has_fenced(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    for engine_id in ("shared-0", "apart-0"):
        bench[engine_id].fail_next("pause_generation", BROKEN)
    with pytest.raises(PhaseFailed, match="apart-0") as caught:
        await bench.server.offload()
    assert any("also fenced: engine shared-0" in note for note in caught.value.__notes__)


async def test_a_stop_during_verify_is_told_as_such(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    await bench.server.offload()
    gates = [engine.hold("weights_checker") for engine in bench.engines]
    onloading = asyncio.create_task(bench.server.push(push(1)))
    await gates[0].entered.wait()
    await bench.server.stop()
    with pytest.raises(PhaseFailed, match="was stopped"):
        await onloading


async def test_a_half_failed_pause_does_not_let_the_gate_open_over_a_paused_engine(
    tmp_path: Path,
) -> None:
    groups = {"shared": {"num_engines": 2, "min_engines": 1}}
    bench = await started_server(tmp_path, groups, lifecycle=RAISE)
    bench["shared-0"].fail_next("pause_generation", BROKEN)
    with pytest.raises(PhaseFailed):
        await bench.server.offload()
    await bench.server.serve()
    assert bench.router.gate == "open"
    assert bench["shared-1"].paused is None
