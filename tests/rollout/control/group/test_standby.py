"""Standbys over fakes, in virtual time: they sleep, take the place of an engine, and come again."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeLauncher, faults
from engines.protocol.errors import EngineNotReady
from rollout.core.errors import PhaseFailed
from rollout.core.types import EngineStatus
from tests.support.builders import ServerBench, make_server, push, slots
from tests.support.virtual_time import pass_time, virtual_time

ONE = {"main": {"num_engines": 1, "standby": 1}}
TWO = {"main": {"num_engines": 2, "standby": 1}}
HEALTH = {"probe_interval_s": 1.0, "backoff_s": 4.0, "max_restarts": 100}


@asynccontextmanager
async def serving(
    folder: Path,
    groups: Mapping[str, Any] = ONE,
    *,
    update: str = "frozen",
    launcher: FakeLauncher | None = None,
) -> AsyncIterator[ServerBench]:
    """A server whose engines all have a standby; at the end no process is left.

    With ``frozen`` an engine that wakes has its weights again, without a push.
    """
    bench = make_server(folder, groups, update=update, health=HEALTH, launcher=launcher)
    await bench.server.start()
    try:
        await until(bench, "ready")
        yield bench
    finally:
        await bench.server.stop()
    assert all(process.is_stopped for process in processes(bench))


def processes(bench: ServerBench) -> list[Any]:
    return list(bench.launcher.processes.values())


async def engines(bench: ServerBench) -> list[EngineStatus]:
    (group,) = (await bench.server.status()).groups
    return list(group.engines)


async def until(bench: ServerBench, standby: str, state: str = "serving") -> None:
    """Virtual seconds pass until all engines are like this."""
    async with asyncio.timeout(200):
        wanted = {(state, standby)}
        while {(one.state, one.standby) for one in await engines(bench)} != wanted:
            await pass_time(0.01)


def is_released(engine: FakeEngine) -> bool:
    return engine.paused is not None and engine.resident_bytes == 0


def launches(bench: ServerBench) -> list[str]:
    return [spec.engine_id for spec in bench.launcher.specs]


@virtual_time
async def test_a_standby_sleeps_and_takes_the_place_and_the_name_of_an_engine_that_dies(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as bench:
        assert is_released(bench["standby-main-0"])
        bench.launcher.hold("main-0")  # no boot can help
        bench["main-0"].die("killed -9")
        await pass_time(1.5)  # one probe
        (engine,) = await engines(bench)
        assert (engine.engine_id, engine.state) == ("main-0", "serving")
        assert engine.process_name == "standby-main-0"
        assert bench.router.states == {"main-0": "serving"}
        assert bench.router.members[0].endpoint == bench["standby-main-0"].endpoint


@virtual_time
async def test_the_next_standby_boots_behind_it_and_takes_its_place_in_turn(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        for name in ("main-0", "standby-main-0") * 2:
            bench[name].die("killed -9")
            await pass_time(1.5)
            await until(bench, "ready")
            assert is_released(bench[name])
        assert launches(bench) == ["main-0", "standby-main-0"] * 3


@virtual_time
async def test_while_the_trainer_has_the_memory_a_standby_joins_asleep_and_gets_the_push(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, TWO, update="full") as bench:
        await bench.server.offload()
        bench["main-1"].die("killed -9")
        await pass_time(3)
        assert [one.state for one in await engines(bench)] == ["offloaded", "stale"]
        assert all(process.engine.resident_bytes == 0 for process in processes(bench))
        assert len(launches(bench)) == 4  # the next one waits for the memory
        await bench.server.push(push(1))
        assert [one.weight_version for one in await engines(bench)] == [1, 1]
        assert bench.router.states == {"main-0": "serving", "main-1": "serving"}
        await until(bench, "ready")


@virtual_time
async def test_an_offload_ends_a_standby_that_boots_and_lets_the_others_sleep(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, TWO, update="full") as bench:
        launch = bench.launcher.hold("standby-main-1")
        bench["standby-main-1"].die("killed -9")
        await launch.entered.wait()
        slept = bench["standby-main-0"]
        await bench.server.offload()
        assert launch.num_waiting == 0
        assert is_released(slept)
        assert not slept.is_dead
        await pass_time(5)
        assert launch.num_waiting == 0
        launch.open()
        await bench.server.push(push(1))
        await until(bench, "ready")


@virtual_time
async def test_the_death_of_a_standby_is_seen_and_disturbs_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        epochs = len(bench.router.epochs)
        bench["standby-main-0"].die("killed -9")
        await pass_time(1.5)
        await until(bench, "ready")
        assert launches(bench).count("standby-main-0") == 2
        assert len(bench.router.epochs) == epochs


@virtual_time
async def test_an_engine_whose_standby_has_died_too_boots_as_without_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        for engine in (bench["standby-main-0"], bench["main-0"]):
            engine.die("killed -9")
        await pass_time(1.5)
        await until(bench, "ready")
        assert sorted(launches(bench)) == sorted(["main-0", "standby-main-0"] * 2)


@virtual_time
async def test_both_die_while_the_trainer_has_the_memory_and_nothing_boots(tmp_path: Path) -> None:
    async with serving(tmp_path, TWO, update="full") as bench:
        await bench.server.offload()
        for engine in (bench["standby-main-0"], bench["main-0"]):
            engine.die("killed -9")
        await pass_time(5)
        assert len(launches(bench)) == 4
        await bench.server.push(push(1))
        await pass_time(5)
        await bench.server.push(push(2))
        await until(bench, "ready")


@virtual_time
async def test_an_engine_that_dies_while_its_standby_boots_gets_that_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        launch = bench.launcher.hold("standby-main-0")
        bench["standby-main-0"].die("killed -9")
        await launch.entered.wait()
        bench["main-0"].die("killed -9")
        await pass_time(5)
        launch.open()
        await pass_time(0.5)
        (engine,) = await engines(bench)
        assert (engine.state, engine.process_name) == ("serving", "standby-main-0")
        await until(bench, "ready")
        assert launches(bench).count("main-0") == 2


@virtual_time
async def test_a_standby_that_dies_while_it_wakes_is_followed_by_a_boot(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        bench["standby-main-0"].faults.strike("resume_memory_occupation", faults.die())
        bench["main-0"].die("killed -9")
        await pass_time(6)  # longer than the backoff
        await until(bench, "ready")


@virtual_time
async def test_a_standby_that_does_not_boot_is_tried_again_and_the_reason_is_shown(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as bench:
        bench.launcher.fail_next("standby-main-0", EngineNotReady("no CUDA"))
        bench["standby-main-0"].die("killed -9")
        await pass_time(2.5)
        (engine,) = await engines(bench)
        assert engine.state == "serving"
        assert "did not boot" in engine.standby
        assert "no CUDA" in engine.standby
        await until(bench, "ready")


@virtual_time
async def test_an_engine_that_is_removed_leaves_no_standby(tmp_path: Path) -> None:
    async with serving(tmp_path, TWO) as bench:
        await bench.server.remove_engine("main-1")
        await pass_time(5)
        assert bench["standby-main-1"].is_dead
        await bench.server.add_engine("main-1")
        await until(bench, "ready")


@virtual_time
async def test_a_stop_while_a_standby_wakes_leaves_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        gate = bench["standby-main-0"].hold("resume_memory_occupation")
        bench["main-0"].die("killed -9")
        await gate.entered.wait()


@virtual_time
async def test_a_group_that_keeps_its_memory_may_have_a_standby_on_cpus(tmp_path: Path) -> None:
    groups = {"main": {"standby": 1, "needs_offload": False}}
    async with serving(tmp_path, groups, update="full") as bench:
        assert bench["standby-main-0"].paused is not None
        bench["main-0"].die("killed -9")
        await pass_time(1.5)
        await until(bench, "ready")


GPUS: dict[str, Any] = {
    "main": {"num_engines": 2, "standby": 1, "engine": {"kind": "fake", "gpus": 1}}
}


@virtual_time
async def test_on_gpus_a_standby_boots_before_the_engine_that_takes_its_memory(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, GPUS) as bench:
        names = launches(bench)
        assert set(names[:2]) == {"standby-main-0", "standby-main-1"}
        assert set(names[2:]) == {"main-0", "main-1"}


@virtual_time
async def test_on_gpus_the_next_standby_waits_for_room_and_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, GPUS) as bench:
        bench.launcher.processes["standby-main-0"].gpus.total_bytes = 100
        bench["main-0"].die("killed -9")
        await pass_time(5)
        standby = (await engines(bench))[0].standby
        assert "GPU GPU-0 has" in standby
        assert "a boot needs" in standby
        assert len(launches(bench)) == 4
        bench.launcher.processes["standby-main-0"].gpus.total_bytes = 1 << 50
        await until(bench, "ready")


@pytest.mark.parametrize("seed", range(12))
def test_random_deaths_in_steps_leave_every_engine_serving_and_the_memory_with_the_trainer(
    tmp_path: Path, seed: int
) -> None:
    @virtual_time
    async def run() -> None:
        async with serving(tmp_path, TWO, update="full") as bench:
            await steps(bench, random.Random(seed))

    run()


async def again(command: Callable[[], Awaitable[Any]]) -> None:
    """Call a command until no death of all engines at the same time has made it fail."""
    for _ in range(20):
        try:
            await command()
            return
        except PhaseFailed:
            await pass_time(1.5)
    raise AssertionError("it never ended well")


async def steps(bench: ServerBench, drawn: random.Random) -> None:
    """Steps, while processes die at random times; then all is as at the beginning."""

    async def kill() -> None:
        for _ in range(20):
            await pass_time(drawn.expovariate(0.5))
            drawn.choice(processes(bench)).engine.die("killed -9")

    killing = asyncio.create_task(kill())
    while not killing.done():
        await pass_time(drawn.uniform(0, 6))
        await again(bench.server.offload)
        for _ in range(6):
            assert not sum(process.engine.resident_bytes for process in processes(bench))
            await pass_time(0.5)
        version = bench.server.weight_version + 1
        await again(partial(bench.server.push, push(version)))
    await pass_time(120)  # longer than a backoff
    await bench.server.push(push(bench.server.weight_version + 1))
    await until(bench, "ready")
    assert set(bench.router.states.values()) == {"serving"}
    versions = {one.weight_version for one in await engines(bench)}
    assert versions == {bench.server.weight_version}


def test_the_names_of_slots_and_standbys_differ() -> None:
    names = [name for one in slots("standby", 2) for name in (one.engine_id, one.standby_name)]
    assert len(set(names)) == 4
