"""All engines die and come back without weights: no command says OK, and some leads out."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeTensor
from engines.fake.engine.fake_weights import fingerprint_of
from engines.protocol.errors import EngineUnreachable
from rollout.core.errors import PhaseFailed, WeightMismatch
from rollout.rules.lifecycle import Command
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.weight_push import WeightPush
from tests.support.builders import TENSOR_NAMES, ServerBench, make_server, manifest, push, save
from tests.support.virtual_time import pass_time, virtual_time

HEALTH = {"probe_interval_s": 1.0, "probe_timeout_s": 0.5}
OFFLOADING = {"main": {"num_engines": 2}}
KEEPING = {"main": {"num_engines": 2, "needs_offload": False}}
MIXED = {"shared": {"num_engines": 2}, "apart": {"num_engines": 2, "needs_offload": False}}


@asynccontextmanager
async def recovering(
    folder: Path, groups: Mapping[str, Any] = OFFLOADING, **more: Any
) -> AsyncIterator[ServerBench]:
    """A server that serves, and restarts the engines that die; no source has their weights."""
    health = HEALTH | more.pop("health", {})
    bench = make_server(folder, groups, health=health, **more)
    await bench.server.start()
    try:
        yield bench
    finally:
        await bench.server.stop()


async def kill_all(bench: ServerBench) -> None:
    """Kill every engine, and wait until each one runs again."""
    dead = bench.engines
    for engine in dead:
        engine.die("killed -9")
    async with asyncio.timeout(200):
        while any(engine in bench.engines for engine in dead):
            await pass_time(0.05)  # virtual seconds: this is how they pass
        await pass_time(2)


def with_fingerprints(version: int, value: float | None = None) -> WeightPush:
    """A push whose manifest says what it holds."""
    value = version if value is None else value
    plain, contents = manifest(), push(int(value))
    prints = {
        name: fingerprint_of(FakeTensor(spec.shape, value)) for name, spec in plain.tensors.items()
    }
    return WeightPush(version, Manifest(plain.tensors, prints), contents.buckets)


async def phase(bench: ServerBench) -> str:
    return (await bench.server.status()).phase


async def serves(bench: ServerBench, version: int) -> None:
    """Every engine serves, and holds what was pushed as ``version``."""
    status = await bench.server.status()
    assert (status.gate, status.weight_version) == ("open", version)
    assert bench.router.gates[-1] == {"state": "open", "weight_version": version}
    assert set(bench.router.states.values()) == {"serving"}
    assert {await engine.weight_version() for engine in bench.engines} == {str(version)}
    assert len({engine.weights.checksum() for engine in bench.engines}) == 1
    assert not any(engine.weights_are_garbage for engine in bench.engines)


# -- a command that says OK, and no engine serves -----------------------------------------------


async def onload_up_to_kv(bench: ServerBench, version: int) -> None:
    await bench.server.offload()
    await bench.server.run(Command.ONLOAD_WEIGHTS)
    await bench.server.update_weights(push(version))
    await bench.server.run(Command.VERIFY)
    await bench.server.run(Command.ONLOAD_KV)


@virtual_time
async def test_continue_fails_when_every_engine_came_back_without_weights(tmp_path: Path) -> None:
    async with recovering(tmp_path) as bench:
        await onload_up_to_kv(bench, 1)
        await kill_all(bench)
        message = r"main-0.*main-1.*lack.*weight version 1.*push"
        with pytest.raises(PhaseFailed, match=message):
            await bench.server.run(Command.CONTINUE_GENERATION)
        assert await phase(bench) == "kv_onloaded"
        assert bench.router.gate == "closed"
        assert "main-0" in bench.router.gates[-1]["reason"]
        await bench.server.push(push(1))
        await serves(bench, 1)


@virtual_time
async def test_sync_weights_again_after_all_died_before_continue(tmp_path: Path) -> None:
    async with recovering(tmp_path, KEEPING) as bench:
        await bench.server.run(Command.PAUSE_GENERATION)
        await bench.server.run(Command.FLUSH_CACHE)
        await bench.server.update_weights(push(1))
        await bench.server.run(Command.VERIFY)
        await kill_all(bench)
        with pytest.raises(PhaseFailed, match="push"):
            await bench.server.run(Command.CONTINUE_GENERATION)
        assert await phase(bench) == "verified"
        await bench.server.push(push(1))
        await serves(bench, 1)


@virtual_time
async def test_continue_restores_from_a_source_what_no_engine_holds(tmp_path: Path) -> None:
    health = {"weights_path": str(tmp_path / "saved" / "{version}")}
    async with recovering(tmp_path, health=health) as bench:
        await onload_up_to_kv(bench, 1)
        save(bench["main-0"], tmp_path / "saved" / "1")
        for engine in bench.engines:
            engine.die("killed -9")
        await pass_time(20)
        await bench.server.run(Command.CONTINUE_GENERATION)
        assert set(bench.router.states.values()) == {"serving"}


@virtual_time
async def test_a_step_of_a_frozen_server_survives_all_its_engines(tmp_path: Path) -> None:
    async with recovering(tmp_path, update="frozen") as bench:
        await bench.server.offload()
        for engine in bench.engines:
            engine.die("killed -9")
        await pass_time(20)
        await bench.server.serve()
        await serves(bench, 0)


@virtual_time
async def test_the_gate_stays_shut_over_the_only_engine_left_if_it_is_stale(tmp_path: Path) -> None:
    async with recovering(tmp_path, update="partial") as bench:
        await bench.server.push(push(1))
        bench["main-0"].die("killed -9")
        await pass_time(20)
        bench["main-1"].fail_next("continue_generation", EngineUnreachable("connection broke"))
        with pytest.raises(PhaseFailed, match=r"main-0 .*lack.*weights\.store"):
            await bench.server.push(push(2, TENSOR_NAMES[:1]))
        assert bench.router.gate == "closed"


@virtual_time
async def test_a_restarted_engine_has_what_is_not_pushed_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    async with recovering(tmp_path, not_pushed=["lm_head.*"]) as bench:
        await bench.server.push(push(1, TENSOR_NAMES[:2]))
        bench["main-0"].die("killed -9")
        await pass_time(20)
        await bench.server.offload()
        await bench.server.push(push(2, TENSOR_NAMES[:2]))
        await serves(bench, 2)
        assert bench["main-0"].weights.digests == bench["main-1"].weights.digests


# -- the same version again -------------------------------------------------------------------


@pytest.mark.parametrize("groups", [OFFLOADING, KEEPING, MIXED], ids=["offload", "keep", "mixed"])
@pytest.mark.parametrize("are_dead", [True, False], ids=["dead", "fenced"])
def test_a_version_that_served_is_spent_also_when_all_engines_that_got_it_are_lost(
    tmp_path: Path, groups: Any, are_dead: bool
) -> None:
    @virtual_time
    async def run() -> None:
        async with recovering(tmp_path, groups, health={"recover": are_dead}) as bench:
            await bench.server.offload()
            await bench.server.push(push(1))
            if are_dead:
                await kill_all(bench)
            else:
                for engine in bench.engines:
                    engine.fail_next("pause_generation", EngineUnreachable("connection broke"))
                with pytest.raises(PhaseFailed):
                    await bench.server.offload()
            with pytest.raises(WeightMismatch, match=r"1, which has served.*push it as version 2"):
                await bench.server.push(push(1))
            if are_dead:
                await bench.server.push(push(2))
                await serves(bench, 2)

    run()


@virtual_time
async def test_an_onload_whose_engines_died_after_the_update_is_repeated(tmp_path: Path) -> None:
    async with recovering(tmp_path) as bench:
        await bench.server.offload()
        gates = [bench[name].hold("weight_version") for name in ("main-0", "main-1")]
        onloading = asyncio.create_task(bench.server.push(push(1)))
        for gate in gates:
            await gate.entered.wait()
        for engine in bench.engines:
            engine.die("killed -9")
        with pytest.raises(PhaseFailed):
            await onloading
        await pass_time(20)
        await bench.server.push(push(1))
        await serves(bench, 1)


@virtual_time
async def test_a_version_that_served_takes_no_other_contents(tmp_path: Path) -> None:
    async with recovering(tmp_path) as bench:
        await bench.server.offload()
        await bench.server.push(with_fingerprints(1))
        await kill_all(bench)
        await bench.server.offload()
        with pytest.raises(WeightMismatch, match=r"weight version 1 .* other contents.* 2"):
            await bench.server.push(with_fingerprints(1, value=7))
        await bench.server.push(with_fingerprints(1))
        await serves(bench, 1)


@virtual_time
async def test_the_same_push_again_takes_no_other_contents_before_it_serves(tmp_path: Path) -> None:
    async with recovering(tmp_path) as bench:
        await bench.server.push(with_fingerprints(1))
        await bench.server.offload()
        await bench.server.run(Command.ONLOAD_WEIGHTS)
        await bench.server.update_weights(with_fingerprints(1))
        with pytest.raises(WeightMismatch, match="has served with other contents"):
            await bench.server.push(with_fingerprints(1, value=7))
        await bench.server.push(with_fingerprints(1))
        await serves(bench, 1)


@virtual_time
async def test_the_same_contents_may_be_pushed_twice(tmp_path: Path) -> None:
    async with recovering(tmp_path) as bench:
        await bench.server.push(with_fingerprints(1))
        await bench.server.push(with_fingerprints(1))
        await serves(bench, 1)
        with pytest.raises(WeightMismatch, match="has served with other contents"):
            await bench.server.push(with_fingerprints(1, value=7))
        with pytest.raises(WeightMismatch, match="not newer than 1"):
            await bench.server.push(push(1))
        await serves(bench, 1)


@virtual_time
async def test_a_release_gives_up_no_version(tmp_path: Path) -> None:
    """Between two steps no engine holds weights, but all are there to be given the next ones."""
    async with recovering(tmp_path) as bench:
        await bench.server.push(push(1))
        await bench.server.offload()
        with pytest.raises(WeightMismatch, match="not newer than 1"):
            await bench.server.push(push(1))
        await bench.server.push(push(2))
        await serves(bench, 2)


@virtual_time
async def test_a_command_by_hand_repeats_the_push_of_engines_that_died(tmp_path: Path) -> None:
    async with recovering(tmp_path) as bench:
        await onload_up_to_kv(bench, 1)
        await kill_all(bench)
        await bench.server.update_weights(push(1))
        for command in (Command.VERIFY, Command.ONLOAD_KV, Command.CONTINUE_GENERATION):
            await bench.server.advance(command)
        await serves(bench, 1)


# -- what a restarted engine holds --------------------------------------------------------------


@virtual_time
async def test_an_engine_that_was_restarted_to_be_released_holds_no_version(tmp_path: Path) -> None:
    """Its release loses the checkpoint that it started from: it is no reference for another."""
    async with recovering(tmp_path, lifecycle={"on_failure": "raise"}) as bench:
        await bench.server.offload()
        bench["main-0"].die("killed -9")
        await pass_time(20)
        await bench.server.run(Command.ONLOAD_WEIGHTS)
        await pass_time(20)
        assert bench["main-0"].weights_are_garbage
        held = {one.engine_id: one for one in (await bench.server.status()).groups[0].engines}
        assert held["main-0"].weight_version is None
        assert held["main-0"].is_stale
        bench["main-1"].die("killed -9")
        await pass_time(20)
        await bench.server.push(push(1))
        await serves(bench, 1)
