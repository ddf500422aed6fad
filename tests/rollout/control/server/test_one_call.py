"""``push`` and ``offload`` from every phase of a step, after every kind of trouble."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.protocol import MemoryTag
from engines.protocol.errors import EngineUnreachable
from rollout.core.errors import LifecycleError, PhaseFailed, WeightMismatch
from rollout.rules.lifecycle import Command
from tests.support.builders import ServerBench, make_server, push
from tests.support.virtual_time import pass_time, virtual_time

GROUPS: dict[str, dict[str, Any]] = {
    "offloading": {"main": {"num_engines": 2}},
    "keeping": {"main": {"num_engines": 2, "needs_offload": False}},
    "mixed": {"main": {"num_engines": 2}, "apart": {"num_engines": 1, "needs_offload": False}},
}
STEP = (
    Command.PAUSE_GENERATION,
    Command.FLUSH_CACHE,
    Command.RELEASE_MEMORY_OCCUPATION,
    Command.ONLOAD_WEIGHTS,
    Command.UPDATE_WEIGHTS,
    Command.VERIFY,
    Command.ONLOAD_KV,
)
# What happens before the call: the engines that die, or the call of an engine that fails in it.
DEATHS = {"no engine died": (), "one engine died": ("main-0",), "all engines died": ("main-",)}
FAILURES = (
    "pause_generation",
    "flush_cache",
    "release_memory_occupation",
    "resume_memory_occupation",
    "update_weights_from_tensor",
    "weight_version",
    "continue_generation",
)
HEALTH = {"probe_interval_s": 1.0, "probe_timeout_s": 0.5, "max_restarts": 100, "backoff_s": 0.01}
SOME_GROUPS = [
    "mixed",
    pytest.param("offloading", marks=pytest.mark.slow),
    pytest.param("keeping", marks=pytest.mark.slow),
]


@asynccontextmanager
async def after_steps(
    folder: Path, groups: str, num_steps: int, **lifecycle: Any
) -> AsyncIterator[ServerBench]:
    """A server in the phase after so many commands of a step; engines that die are restarted."""
    bench = make_server(folder, GROUPS[groups], health=HEALTH, lifecycle=lifecycle)
    await bench.server.start()
    try:
        for command in STEP[:num_steps]:
            if command is Command.UPDATE_WEIGHTS:
                await bench.server.update_weights(push(1))
            else:
                await bench.server.advance(command)
        yield bench
    finally:
        await bench.server.stop()


def kill(bench: ServerBench, names: tuple[str, ...]) -> None:
    for engine_id in list(bench.launcher.processes):
        if names and engine_id.startswith(names):
            bench[engine_id].die("killed -9")


async def again(call: Callable[[], Awaitable[Any]]) -> None:
    """Call it, and if it fails, call it again, as the documentation says."""
    for _ in range(3):
        try:
            await call()
        except PhaseFailed:
            await pass_time(20)  # virtual: recovery restarts what has failed
        else:
            return
    await call()


async def check_serves(bench: ServerBench, version: int) -> None:
    status = await bench.server.status()
    assert (status.phase, status.gate, status.weight_version) == ("serving", "open", version)
    serving = {name for name, state in bench.router.states.items() if state == "serving"}
    assert serving
    for engine_id in serving:
        assert await bench[engine_id].weight_version() == str(version)
        assert not bench[engine_id].weights_are_garbage
    assert len({bench[engine_id].weights.checksum() for engine_id in serving}) == 1


async def check_released(bench: ServerBench) -> None:
    status = await bench.server.status()
    assert status.gate != "open"
    for group in status.groups:
        if group.needs_offload:
            assert group.phase == "offloaded"
            living = [one.engine_id for one in group.engines if not one.fence_reason]
            assert all(bench[one].released == set(MemoryTag) for one in living), living


async def check_both_ways(bench: ServerBench, first: str) -> None:
    """Each call leads to its end; repeated, it stays there."""
    server = bench.server
    if first == "offload":
        await again(server.offload)
        await check_released(bench)
        await again(server.offload)
        await check_released(bench)
    version = server.weight_version + 1
    await again(lambda: server.push(push(version)))
    await check_serves(bench, version)
    await again(lambda: server.push(push(version + 1)))
    await check_serves(bench, version + 1)


@pytest.mark.parametrize("groups", SOME_GROUPS)
@pytest.mark.parametrize("deaths", DEATHS)
@pytest.mark.parametrize("first", ["push", "offload"])
def test_from_every_phase_whichever_engines_died(
    tmp_path: Path, first: str, deaths: str, groups: str
) -> None:
    @virtual_time
    async def run(num_steps: int) -> None:
        async with after_steps(tmp_path, groups, num_steps) as bench:
            kill(bench, DEATHS[deaths])
            await pass_time(20 if deaths != "no engine died" else 0)
            await check_both_ways(bench, first)

    for num_steps in range(len(STEP) + 1):
        run(num_steps)


@pytest.mark.parametrize("groups", SOME_GROUPS)
@pytest.mark.parametrize("operation", FAILURES)
@pytest.mark.parametrize("first", ["push", "offload"])
def test_from_every_phase_whichever_call_fails(
    tmp_path: Path, first: str, operation: str, groups: str
) -> None:
    @virtual_time
    async def run(num_steps: int, on_failure: str) -> None:
        async with after_steps(tmp_path, groups, num_steps, on_failure=on_failure) as bench:
            bench["main-0"].fail_next(operation, EngineUnreachable("connection broke"))
            await check_both_ways(bench, first)

    for num_steps in range(len(STEP) + 1):
        run(num_steps, "raise" if num_steps % 2 else "fence")


@virtual_time
async def test_a_call_that_failed_after_the_push_is_repeated_with_the_same_version(
    tmp_path: Path,
) -> None:
    """The caller makes the push again, and without fingerprints nothing shows that it is equal."""
    async with after_steps(tmp_path, "offloading", 3, on_failure="raise") as bench:
        bench["main-0"].fail_next("continue_generation", EngineUnreachable("connection broke"))
        with pytest.raises(PhaseFailed):
            await bench.server.push(push(1))
        await bench.server.push(push(1))
        await check_serves(bench, 1)
        with pytest.raises(WeightMismatch, match="not newer than 1"):
            await bench.server.push(push(1))


@virtual_time
async def test_a_version_that_the_router_may_have_served_takes_no_unknown_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with after_steps(tmp_path, "offloading", 3) as bench:
        set_gate = bench.router.set_gate

        async def lose_reply(state: str, **more: Any) -> None:
            await set_gate(state, **more)
            if state == "open":
                raise ConnectionError("the reply is lost")

        monkeypatch.setattr(bench.router, "set_gate", lose_reply)
        with pytest.raises(Exception, match="the reply is lost"):
            await bench.server.push(push(1))
        monkeypatch.undo()
        with pytest.raises(WeightMismatch, match="not newer than 1"):
            await bench.server.push(push(1))
        await bench.server.serve()
        await check_serves(bench, 1)


@virtual_time
async def test_memory_is_given_back_between_two_phases_of_an_onload_and_weights_after_it(
    tmp_path: Path,
) -> None:
    async with after_steps(tmp_path, "offloading", 5) as bench:
        freed = await bench.server.offload()
        assert [report.command for report in freed.reports] == ["release_memory_occupation"]
        await check_released(bench)
        with pytest.raises(LifecycleError, match="else with push"):
            await bench.server.serve()
        await bench.server.push(push(1))
        await check_serves(bench, 1)


def test_one_call_is_refused_before_the_server_has_started(tmp_path: Path) -> None:
    bench = make_server(tmp_path, GROUPS["offloading"])

    async def run(call: Callable[[], Awaitable[Any]]) -> None:
        with pytest.raises(LifecycleError, match="group main is still starting"):
            await call()

    calls: Mapping[str, Callable[[], Awaitable[Any]]] = {
        "offload": bench.server.offload,
        "serve": bench.server.serve,
        "push": lambda: bench.server.push(push(1)),
    }
    for call in calls.values():
        asyncio.run(run(call))


@virtual_time
async def test_a_stop_right_after_a_failed_call_ends_recovery_too(tmp_path: Path) -> None:
    async with after_steps(tmp_path, "offloading", 0, on_failure="raise") as bench:
        bench["main-0"].fail_next("pause_generation", EngineUnreachable("connection broke"))
        with pytest.raises(PhaseFailed):
            await bench.server.offload()
        async with asyncio.timeout(1000):
            await bench.server.stop()
