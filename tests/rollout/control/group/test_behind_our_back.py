"""Attached engines that other programs replace or change are fenced by name, and no others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeTensor
from engines.protocol import Endpoint
from engines.protocol.errors import EngineHung
from rollout.core.errors import PhaseFailed, WeightMismatch
from rollout.core.types import EngineStatus
from rollout.rules.lifecycle import Command
from tests.support.builders import TENSOR_NAMES, ServerBench, make_server, push
from tests.support.their_engines import TheirEngines
from tests.support.virtual_time import pass_time, virtual_time

URLS = ("http://127.0.0.1:4000", "http://127.0.0.1:4001")
GROUPS = {"main": {"engine": {"kind": "attached", "urls": list(URLS)}}}
HEALTH = {"probe_interval_s": 1.0, "probe_timeout_s": 0.5, "backoff_s": 5.0}
CANARIES = {"by": "canary", "canary_prompts": [[1, 2, 3], [4, 5]], "sentinel": False}


@asynccontextmanager
async def serving(
    folder: Path, *, version: int = 1, verify: Any = None, **settings: Any
) -> AsyncIterator[ServerBench]:
    """A server over two engines of others, which serves ``version``."""
    theirs = TheirEngines(**settings)
    more = {"verify": verify, "health": HEALTH}
    bench = make_server(folder, GROUPS, launcher=theirs, **more)
    await bench.server.start()
    try:
        if version:
            await step(bench, version)
        yield bench
    finally:
        await bench.server.stop()


async def step(bench: ServerBench, version: int) -> None:
    await bench.server.offload()
    await bench.server.push(push(version))


async def status_of(bench: ServerBench, engine_id: str) -> EngineStatus:
    (group,) = (await bench.server.status()).groups
    return next(one for one in group.engines if one.engine_id == engine_id)


def scribble(engine: FakeEngine) -> None:
    """What a request of somebody else to the engine leaves: other weights, of the same version."""
    tensor = engine.weights.tensors[TENSOR_NAMES[1]]
    engine.weights.write([(TENSOR_NAMES[1], FakeTensor(tensor.shape, -1.0))])


def replace(bench: ServerBench, version: str) -> None:
    """Another process, with other weights, on the same port between two probes."""
    launcher = bench.launcher
    assert isinstance(launcher, TheirEngines)
    scribble(launcher.start(Endpoint.of_url(URLS[0]), version))


async def rename(bench: ServerBench) -> None:
    await bench["main-0"].update_weight_version("7")


CHANGES: dict[str, tuple[Callable[[ServerBench], Any], str]] = {
    "another process of another version": (lambda one: replace(one, "0"), "another process is in"),
    "another process of that version": (lambda one: replace(one, "1"), "another process is in"),
    "another version": (rename, "reports weight version '7', not '1'"),
    "other weights of that version": (
        lambda one: scribble(one["main-0"]),
        f"tensor '{TENSOR_NAMES[1]}' is not what it was when weight version 1 was verified",
    ),
}


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("at_s", [0.0, 0.3, 0.95, 1.0, 1.5])
@virtual_time
async def test_what_others_did_to_an_engine_fences_it_by_name(
    tmp_path: Path, change: str, at_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    act, why = CHANGES[change]
    async with serving(tmp_path) as bench:
        await pass_time(at_s)
        done = act(bench)
        if done is not None:
            await done
        await pass_time(2 * HEALTH["probe_interval_s"] + 0.1)
        assert bench.router.states["main-0"] != "serving"
        assert f"engine main-0 is dead: {why}" in caplog.text.replace("it reports", "reports")
        await pass_time(300)  # it is not taken back by its number, or because it answers
        assert bench.router.states == {"main-0": "fenced", "main-1": "serving"} or (
            "process" in change and bench.router.states["main-0"] != "serving"
        )
        assert (await status_of(bench, "main-1")).fence_reason == ""


@pytest.mark.parametrize("change", ["another version", "other weights of that version"])
@virtual_time
async def test_the_first_reason_stays_while_its_owner_does_nothing(
    tmp_path: Path, change: str
) -> None:
    act, why = CHANGES[change]
    async with serving(tmp_path) as bench:
        done = act(bench)
        if done is not None:
            await done
        await pass_time(300)
        reason = (await status_of(bench, "main-0")).fence_reason
        assert why.removeprefix("reports") in reason
        assert "its owner has to restart it" in reason
        assert len(reason) < 900


@pytest.mark.parametrize("version", ["0", "2", "default"])
@virtual_time
async def test_another_process_serves_after_the_next_push_and_not_before(
    tmp_path: Path, version: str
) -> None:
    async with serving(tmp_path) as bench:
        replace(bench, version)
        await pass_time(100)
        assert bench.router.states["main-0"] != "serving"
        await step(bench, 2)
        await pass_time(5)
        assert set(bench.router.states.values()) == {"serving"}
        held = (bench["main-0"].weights.digests, bench["main-1"].weights.digests)
        assert held[0] == held[1]


@virtual_time
async def test_another_process_that_has_the_right_number_and_wrong_weights_stays_fenced(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as bench:
        replace(bench, "1")
        await pass_time(100)
        await step(bench, 2)
        assert bench.router.states == {"main-0": "fenced", "main-1": "serving"}
        reason = (await status_of(bench, "main-0")).fence_reason
        assert "differs from that of an engine verified at this version" in reason


@virtual_time
async def test_at_version_0_its_number_alone_brings_a_restarted_engine_not_back(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, version=0) as bench:
        replace(bench, "0")
        await pass_time(100)
        assert bench.router.states["main-0"] != "serving"


@virtual_time
async def test_a_restarted_engine_with_the_same_weights_comes_back_by_itself(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, version=0) as bench:
        assert isinstance(bench.launcher, TheirEngines)
        bench.launcher.start(Endpoint.of_url(URLS[0]))
        await pass_time(100)
        assert set(bench.router.states.values()) == {"serving"}


@virtual_time
async def test_without_fingerprints_the_log_probs_show_it(tmp_path: Path) -> None:
    async with serving(tmp_path, verify=CANARIES) as bench:
        assert "weights_checker" not in bench["main-0"].operations()
        await pass_time(20)
        assert set(bench.router.states.values()) == {"serving"}
        scribble(bench["main-0"])
        await pass_time(3)
        reason = (await status_of(bench, "main-0")).fence_reason
        assert "when the weights were the same" in reason
        assert "another program has changed its weights" in reason


def attached(folder: Path, **settings: Any) -> tuple[ServerBench, TheirEngines]:
    theirs = TheirEngines(**settings)
    return make_server(folder, GROUPS, launcher=theirs, health=HEALTH), theirs


async def test_engines_of_one_number_and_other_weights_are_not_attached(tmp_path: Path) -> None:
    bench, theirs = attached(tmp_path)
    scribble(theirs.start(Endpoint.of_url(URLS[1])))
    why = f"attached at weight version 0, but its tensor '{TENSOR_NAMES[1]}' differs"
    with pytest.raises(WeightMismatch, match=why):
        await bench.server.start()
    assert len(theirs.processes) == 2
    assert not any(engine.is_dead for engine in theirs.at.values())


@pytest.mark.parametrize("version", ["0", "3"])
async def test_an_engine_of_another_model_is_not_attached_as_version_0(
    tmp_path: Path, version: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    bench, theirs = attached(tmp_path, model_path=str(other))
    for url in URLS:
        theirs.start(Endpoint.of_url(url), version)
    if version != "0":  # of a push, and then where it was read does not matter
        assert (await bench.server.start(int(version))).gate == "open"
        await bench.server.stop()
        return
    with pytest.raises(PhaseFailed, match=rf"urls: engine main-. has the weights of {other}, and"):
        await bench.server.start()


# -- and no others ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@virtual_time
async def test_no_push_offload_or_probe_at_any_moment_makes_an_engine_suspicious(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(seed)
    async with serving(tmp_path) as bench:
        for version in range(2, 12):
            for engine_id in ("main-0", "main-1"):
                if draw.random() < 0.5:  # a check or a question is under way when the step begins
                    name = draw.choice(["weights_checker", "process_start", "weight_version"])
                    gate = bench[engine_id].hold(name)
                    asyncio.get_running_loop().call_later(draw.uniform(0, 2), gate.open)
            await pass_time(draw.uniform(0, 2))
            await step(bench, version)
        await pass_time(5)
        assert set(bench.router.states.values()) == {"serving"}
    assert "is dead" not in caplog.text


@virtual_time
async def test_what_a_check_found_over_a_command_does_not_count(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        await pass_time(0.5)
        gate = bench["main-0"].hold("weights_checker")
        scribble(bench["main-0"])
        async with asyncio.timeout(60):
            await gate.entered.wait()
        offload = asyncio.create_task(bench.server.offload())
        await pass_time(0.1)
        gate.open()
        await offload
        await bench.server.push(push(2))
        await pass_time(5)
        assert set(bench.router.states.values()) == {"serving"}


@virtual_time
async def test_a_command_that_waits_for_a_check_voids_what_it_found(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        (group,) = bench.groups.values()
        gate = bench["main-0"].hold("weights_checker")
        scribble(bench["main-0"])
        async with asyncio.timeout(60):
            await gate.entered.wait()
        command = asyncio.create_task(group.run(Command.PAUSE_GENERATION))
        await pass_time(0.1)
        assert not command.done()
        gate.open()
        await command
        await group.run(Command.CONTINUE_GENERATION)
        gate = bench["main-0"].hold("weights_checker")
        for probe in (await group.probe(1.0)).engines:
            assert not probe.reason
        gate.open()


@virtual_time
async def test_checks_take_one_percent_of_the_time_at_most(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        engine, took_s = bench["main-0"], 3.0
        at_s: list[float] = []
        clock = asyncio.get_running_loop().time
        for _ in range(3):
            gate = engine.hold("weights_checker")
            async with asyncio.timeout(1000):
                await gate.entered.wait()
            at_s.append(clock())
            await pass_time(took_s)
            gate.open()
        gaps = [after - before for before, after in pairwise(at_s)]
        assert all(100 * took_s <= gap <= 104 * took_s for gap in gaps)
        assert set(bench.router.states.values()) == {"serving"}


@virtual_time
async def test_a_busy_scheduler_that_does_not_say_which_process_it_is_is_no_dead_one(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as bench:
        for _ in range(30):
            bench["main-0"].fail_next("server_info", EngineHung("no answer"))
        await pass_time(20)
        assert set(bench.router.states.values()) == {"serving"}


@virtual_time
async def test_our_own_engines_are_not_asked(tmp_path: Path) -> None:
    bench = make_server(tmp_path, {"main": {"num_engines": 2}}, health=HEALTH)
    await bench.server.start()
    bench["main-0"].calls.clear()
    await pass_time(10)
    assert set(bench["main-0"].operations()) == {"is_ready"}
    await bench.server.stop()


@virtual_time
async def test_nothing_is_checked_while_the_trainer_has_the_memory(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        await bench.server.advance(Command.PAUSE_GENERATION)
        bench["main-0"].calls.clear()
        await pass_time(20)
        assert "weights_checker" not in bench["main-0"].operations()
        await bench.server.offload()
        bench["main-0"].calls.clear()
        await pass_time(20)
        assert bench["main-0"].operations() == []
