"""The router maps to a version when all engines have it, and unused versions are unloaded."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.protocol.errors import EngineRejected, EngineUnreachable
from rollout.config import WeightUpdate
from rollout.core.errors import PhaseFailed, WeightMismatch
from rollout.weights.push.weight_push import WeightPush
from tests.support.builders import ServerBench, adapter_push, push, started_server
from tests.support.virtual_time import pass_time, virtual_time

LOAD = "load_lora_adapter_from_tensors"


def base(version: int) -> WeightPush:
    return replace(push(version), contents=WeightUpdate.FULL)


def opened(bench: ServerBench) -> list[dict[str, object]]:
    return [gate for gate in bench.router.gates if gate["state"] == "open"]


def gate(version: int, base_version: int, **adapters: int) -> dict[str, Any]:
    table = {name: f"{name}@{number}" for name, number in adapters.items()}
    if "policy" in table:
        table[""] = table["policy"]
    weights = {"weight_version": version, "base_version": base_version}
    return {"state": "open", "adapters": table, **weights}


def loaded(bench: ServerBench) -> list[set[str]]:
    return [set(engine.adapters) for engine in bench.engines]


async def started(folder: Path, **more: Any) -> ServerBench:
    more = {"lifecycle": {"drain_timeout_s": 30.0}, "verify": {"sentinel": False}, **more}
    return await started_server(folder, {"main": {"num_engines": 2}}, update="lora", **more)


@virtual_time
async def test_adapters_are_published_without_a_pause_until_a_base_ends_them(
    tmp_path: Path,
) -> None:
    bench = await started(tmp_path)
    report = await bench.server.push(adapter_push(1))
    assert {"stage_adapter", "continue_generation"} == set(report.phase_s)
    assert report.paused_s == 0.0
    await bench.server.push(adapter_push(2, "judge"))
    assert [one["state"] for one in bench.router.gates] == ["closed", "open", "open", "open"]
    await bench.server.push(base(3))
    await bench.server.push(adapter_push(4))
    assert opened(bench) == [
        gate(0, 0),
        gate(1, 0, policy=1),
        gate(2, 0, policy=1, judge=2),
        gate(3, 3),
        gate(4, 3, policy=4),
    ]
    await pass_time(1)
    assert loaded(bench) == [{"policy@4"}] * len(bench.engines)
    await bench.server.stop()


@virtual_time
async def test_the_push_of_an_offload_is_published_when_the_gate_opens(tmp_path: Path) -> None:
    bench = await started(tmp_path)
    await bench.server.offload()
    await bench.server.push(adapter_push(1))
    assert [one["state"] for one in bench.router.gates] == ["closed", "open", "holding", "open"]
    assert opened(bench)[-1] == gate(1, 0, policy=1)
    assert (await bench.server.status()).weight_version == 1
    await bench.server.stop()


@pytest.mark.parametrize("error", [EngineRejected("no", status=400), EngineUnreachable("died")])
@virtual_time
async def test_what_fails_on_one_engine_leaves_the_version_before_everywhere(
    tmp_path: Path, error: Exception
) -> None:
    bench = await started(tmp_path)
    await bench.server.push(adapter_push(1))
    bench.engines[-1].fail_next(LOAD, error)
    with pytest.raises(PhaseFailed, match="policy@2 serves nowhere"):
        await bench.server.push(adapter_push(2))
    assert bench.router.gates[-1] == gate(1, 0, policy=1)  # which no call has changed since
    assert loaded(bench) == [{"policy@1"}] * len(bench.engines)
    await bench.server.push(adapter_push(2))
    assert bench.router.gates[-1] == gate(2, 0, policy=2)
    await bench.server.stop()


@virtual_time
async def test_a_version_is_unloaded_when_its_last_request_has_ended(tmp_path: Path) -> None:
    bench = await started(tmp_path)
    await bench.server.push(adapter_push(1))
    bench.router.pin("policy@1")
    await bench.server.push(adapter_push(2))
    await pass_time(500)
    assert loaded(bench) == [{"policy@1", "policy@2"}] * len(bench.engines)
    bench.router.pins["policy@1"].set()
    await pass_time(1)
    assert loaded(bench) == [{"policy@2"}] * len(bench.engines)
    await bench.server.stop()


@virtual_time
async def test_a_push_waits_for_the_oldest_version_and_then_refuses(tmp_path: Path) -> None:
    bench = await started(tmp_path)
    for version in (1, 2, 3):
        await bench.server.push(adapter_push(version))
        bench.router.pin(f"policy@{version}")
    with pytest.raises(
        WeightMismatch, match="after 30 s 1 requests and sessions stay with policy@1"
    ):
        await bench.server.push(adapter_push(4))
    await bench.server.push(adapter_push(5, "judge"))  # another has room of its own
    assert bench.router.gates[-1] == gate(5, 0, policy=3, judge=5)
    pushing = asyncio.create_task(bench.server.push(adapter_push(6)))
    await pass_time(10)
    assert not pushing.done()
    bench.router.pins["policy@1"].set()
    await pushing
    assert loaded(bench) == [{"policy@2", "policy@3", "judge@5", "policy@6"}] * len(bench.engines)
    await bench.server.stop()


@virtual_time
async def test_a_call_that_is_repeated_loads_nothing_twice(tmp_path: Path) -> None:
    bench = await started(tmp_path)
    await bench.server.push(adapter_push(1))
    num_loads = [engine.operations().count(LOAD) for engine in bench.engines]
    await bench.server.serve()
    assert [engine.operations().count(LOAD) for engine in bench.engines] == num_loads
    assert bench.router.gates[-1] == gate(1, 0, policy=1)
    await bench.server.stop()
