"""Engines that are taken out while the others go on, and come back: by phase, by failure."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engines.fake import faults
from engines.protocol import MemoryTag
from engines.protocol.errors import EngineNotReady, EngineRejected
from rollout.core.errors import EngineFailure, LifecycleError
from rollout.rules.lifecycle import Command, Phase
from tests.support.builders import ServerBench, make_group, push, started_server
from tests.support.virtual_time import virtual_time

THREE = {"main": {"num_engines": 3}}
# Their processes are not ours: they sleep while they are out.
ATTACHED = {
    "main": {
        "engine": {
            "kind": "attached",
            "urls": [f"http://127.0.0.1:{port}" for port in (4000, 4001, 4002)],
        }
    }
}
KEEPING = {"main": {"num_engines": 3, "needs_offload": False}}
# The commands of a step, and the phase a group is in after each.
TO_PHASE = {
    Phase.SERVING: (),
    Phase.PAUSED: (Command.PAUSE_GENERATION,),
    Phase.FLUSHED: (Command.PAUSE_GENERATION, Command.FLUSH_CACHE),
    Phase.OFFLOADED: (
        Command.PAUSE_GENERATION,
        Command.FLUSH_CACHE,
        Command.RELEASE_MEMORY_OCCUPATION,
    ),
}


async def bring_to(bench: ServerBench, phase: Phase) -> None:
    for command in TO_PHASE[phase]:
        await bench.server.advance(command)


async def a_step(bench: ServerBench) -> None:
    await bench.server.offload()
    await bench.server.push(push(bench.server.weight_version + 1))


def states(bench: ServerBench) -> dict[str, str]:
    return bench.router.states


async def test_an_engine_leaves_routing_then_its_requests_end_then_it_is_ended(
    tmp_path: Path,
) -> None:
    bench = await started_server(tmp_path, THREE)
    seen: list[tuple[str, str]] = []

    async def drained(timeout_s: float, engine_id: str = "") -> None:
        seen.append((engine_id, states(bench)["main-1"]))
        assert not bench["main-1"].is_dead

    bench.router.drained = drained  # type: ignore[method-assign]
    report = await bench.server.remove_engine("main-1")
    assert seen == [("main-1", "draining")]
    assert states(bench) == {"main-0": "serving", "main-2": "serving"}
    assert bench["main-1"].death_reason == "stopped"
    assert report.engine_id == "main-1"
    assert report.freed_bytes == 3000
    status = await bench.server.status()
    assert status.groups[0].vacant_slots == ("main-1",)
    await a_step(bench)
    assert bench.router.gate == "open"


async def test_one_that_is_added_again_serves_at_once_if_it_starts_with_the_right_weights(
    tmp_path: Path,
) -> None:
    bench = await started_server(tmp_path, THREE)
    await bench.server.remove_engine("main-1")
    status = await bench.server.add_engine("main-1")
    assert (status.state, status.weight_version) == ("serving", 0)
    assert states(bench) == dict.fromkeys(("main-0", "main-1", "main-2"), "serving")
    assert list(states(bench)) == ["main-0", "main-1", "main-2"]
    assert (await bench.server.status()).groups[0].vacant_slots == ()


async def test_one_that_lacks_what_was_pushed_serves_after_the_next_push(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, THREE)
    await bench.server.remove_engine("main-1")
    await a_step(bench)
    assert (await bench.server.add_engine("main-1")).state == "stale"
    assert states(bench)["main-1"] == "fenced"
    await a_step(bench)
    assert states(bench)["main-1"] == "serving"
    assert bench["main-1"].operations()[-1] == "continue_generation"


@pytest.mark.parametrize(
    "groups", [THREE, KEEPING, ATTACHED], ids=["offloading", "keeping", "attached"]
)
@pytest.mark.parametrize("added_in", list(TO_PHASE))
@pytest.mark.parametrize("removed_in", list(TO_PHASE))
async def test_an_engine_leaves_and_comes_back_in_every_phase(
    tmp_path: Path,
    removed_in: Phase,
    added_in: Phase,
    groups: dict[str, dict[str, Any]],
) -> None:
    bench = await started_server(tmp_path, groups)
    await a_step(bench)
    await bring_to(bench, removed_in)
    await bench.server.remove_engine("main-1")
    if removed_in is not Phase.SERVING:
        await bench.server.push(push(2))
    await bring_to(bench, added_in)
    is_trainers = added_in is Phase.OFFLOADED and groups is THREE
    if is_trainers:
        with pytest.raises(
            LifecycleError, match="offloaded and the trainer uses its memory; onload"
        ):
            await bench.server.add_engine("main-1")
    else:
        await bench.server.add_engine("main-1")
    if added_in is not Phase.SERVING:
        await bench.server.push(push(bench.server.weight_version + 1))
    if is_trainers:
        await bench.server.add_engine("main-1")
    await a_step(bench)
    assert states(bench) == dict.fromkeys(("main-0", "main-1", "main-2"), "serving")
    assert bench.router.gate == "open"
    for engine_id in states(bench):
        engine = bench[engine_id]
        assert not engine.released
        assert not engine.weights_are_garbage
        assert engine.paused is None


async def test_one_that_sleeps_gives_its_memory_back_and_is_woken_as_it_is(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, ATTACHED)
    engine = bench["main-1"]
    report = await bench.server.remove_engine("main-1")
    assert engine.released == set(MemoryTag)
    assert report.freed_bytes == 3000
    # Without a backup its weights are lost, whatever version it says it holds.
    status = await bench.server.add_engine("main-1")
    assert bench["main-1"] is engine
    assert (status.state, engine.released) == ("stale", set())
    assert states(bench)["main-1"] == "fenced"


async def test_a_backup_brings_a_sleeping_engine_back_at_once(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, ATTACHED, update="frozen")
    await bench.server.remove_engine("main-1")
    assert (await bench.server.add_engine("main-1")).state == "serving"
    assert states(bench)["main-1"] == "serving"


async def test_one_whose_backup_was_bad_is_fenced_when_it_wakes(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, ATTACHED, update="frozen")
    await bench.server.remove_engine("main-1")
    bench["main-1"].weights.lose()
    with pytest.raises(Exception, match=r"its tensor .* differs"):
        await bench.server.add_engine("main-1")
    assert states(bench)["main-1"] == "fenced"
    assert bench["main-1"].death_reason == "killed"


async def test_too_few_would_be_left_is_refused_before_anything_happens(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, {"main": {"num_engines": 3, "min_engines": 3}})
    message = r"cannot remove engine main-1: 2 engines would remain in group main, 3 needed"
    with pytest.raises(LifecycleError, match=message):
        await bench.server.remove_engine("main-1")
    assert bench.router.drains == []
    assert states(bench)["main-1"] == "serving"


async def test_unknown_engines_and_places_are_named_with_those_there_are(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, THREE)
    with pytest.raises(LifecycleError, match="no engine main-7 to remove; known: main-0, main-1"):
        await bench.server.remove_engine("main-7")
    with pytest.raises(LifecycleError, match="no vacant slot main-0; vacant: none"):
        await bench.server.add_engine("main-0")


async def test_requests_that_do_not_end_in_time_are_aborted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await started_server(tmp_path, THREE)
    gate = bench["main-1"].hold("generate")
    asked = asyncio.create_task(bench["main-1"].generate(input_ids=[1]))
    await gate.entered.wait()
    bench.router.late = "main-1 has 1 requests in flight"
    await bench.server.remove_engine("main-1")
    reply = await asked
    assert reply.finish_reason is not None
    assert reply.finish_reason.kind == "abort"
    assert "main-1 has 1 requests in flight; these requests are aborted" in caplog.text


async def test_one_that_cannot_be_emptied_is_fenced_and_its_place_is_not_free(
    tmp_path: Path,
) -> None:
    bench = await started_server(tmp_path, THREE)
    bench["main-1"].faults.strike("pause_generation", faults.die())
    with pytest.raises(EngineFailure, match=r"main-1: remove failed: .*a planned death in pause"):
        await bench.server.remove_engine("main-1")
    assert states(bench)["main-1"] == "fenced"
    with pytest.raises(LifecycleError, match="no vacant slot main-1"):
        await bench.server.add_engine("main-1")
    await a_step(bench)


@virtual_time
async def test_a_release_that_is_never_answered_ends_the_engine(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, ATTACHED)
    engine = bench["main-1"]
    engine.faults.strike("release_memory_occupation", faults.hang())
    with pytest.raises(EngineFailure, match="engine main-1: remove failed"):
        await bench.server.remove_engine("main-1")
    assert engine.death_reason == "killed"


async def test_a_fenced_engine_can_be_taken_out_for_good(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, THREE)
    bench["main-1"].fail_next("pause_generation", EngineRejected("broken", status=500))
    await a_step(bench)
    assert states(bench)["main-1"] == "fenced"
    await bench.server.remove_engine("main-1")
    assert "main-1" not in states(bench)
    await bench.server.add_engine("main-1")
    await a_step(bench)
    assert states(bench)["main-1"] == "serving"


async def test_one_that_does_not_start_leaves_its_place_free(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, THREE)
    await bench.server.remove_engine("main-1")
    bench.launcher.fail_next("main-1", EngineNotReady("no such layer"))
    with pytest.raises(EngineFailure, match="main-1: add failed: no such layer"):
        await bench.server.add_engine("main-1")
    assert (await bench.server.status()).groups[0].vacant_slots == ("main-1",)
    assert (await bench.server.add_engine("main-1")).state == "serving"


async def test_one_that_cannot_be_woken_is_ended_and_its_place_stays_free(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, ATTACHED)
    await bench.server.remove_engine("main-1")
    old = bench["main-1"]
    old.faults.strike("resume_memory_occupation", faults.lose(executed=True))
    with pytest.raises(EngineFailure, match=r"main-1: add failed: .*its answer was lost"):
        await bench.server.add_engine("main-1")
    assert old.death_reason == "killed"
    assert (await bench.server.add_engine("main-1")).state == "serving"
    assert bench["main-1"] is not old


async def test_a_command_waits_until_the_engine_has_left(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, THREE)
    gate = bench["main-1"].hold("flush_cache")
    removing = asyncio.create_task(bench.server.remove_engine("main-1"))
    await gate.entered.wait()
    offloading = asyncio.create_task(bench.server.offload())
    for _ in range(50):
        await asyncio.sleep(0)
    assert (await bench.server.status()).lock_owner == "engines.remove"
    assert "pause_generation" not in bench["main-0"].operations()
    gate.open()
    await removing
    await offloading
    assert bench["main-0"].released


async def test_stopping_ends_engines_that_sleep(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, ATTACHED)
    await bench.server.remove_engine("main-1")
    await bench.server.stop()
    assert bench["main-1"].is_dead


async def test_recovery_forgets_who_left_and_watches_who_came(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, THREE, health={"probe_interval_s": 1000})
    recovery = bench.server._recovery
    try:
        await bench.server.remove_engine("main-1")
        await recovery.probe_once()
        assert "main-1" not in recovery.tracker.snapshot()["main"]
        await bench.server.add_engine("main-1")
        assert recovery.tracker.snapshot()["main"]["main-1"].state == "serving"
        bench["main-1"].die("power cut")
        await recovery.probe_once()
        assert states(bench)["main-1"] in ("dead", "fenced")
    finally:
        await bench.server.stop()


async def test_with_raise_all_that_are_there_are_needed(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, THREE, lifecycle={"on_failure": "raise"})
    await bench.server.remove_engine("main-1")
    await a_step(bench)
    assert bench.router.gate == "open"


async def test_a_group_alone_says_what_it_does_not_have() -> None:
    group, _ = make_group(2)
    await group.start()
    with pytest.raises(LifecycleError, match="group main has no engine main-9"):
        await group.remove("main-9")
    with pytest.raises(LifecycleError, match=r"main-0: it has no vacant slot .* vacant: none"):
        await group.add("main-0", 0)


async def test_steps_go_on_while_an_added_engine_boots(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, KEEPING)
    await bench.server.remove_engine("main-1")
    launch = bench.launcher.hold("main-1")
    adding = asyncio.create_task(bench.server.add_engine("main-1"))
    await launch.entered.wait()
    await bench.server.offload()
    await bench.server.push(push(1))
    with pytest.raises(LifecycleError, match="boots already"):
        await bench.server.add_engine("main-1")
    launch.open()
    assert (await adding).state == "stale"
    assert (await bench.server.push(push(2))).weight_version == 2
    assert bench.router.states["main-1"] == "serving"
    await bench.server.stop()


async def test_an_offload_ends_the_boot_of_an_added_engine(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, THREE)
    await bench.server.remove_engine("main-1")
    launch = bench.launcher.hold("main-1")
    adding = asyncio.create_task(bench.server.add_engine("main-1"))
    await launch.entered.wait()
    await bench.server.offload()
    with pytest.raises(LifecycleError, match="the trainer uses its memory; onload first"):
        await adding
    assert launch.num_waiting == 0
    launch.open()
    await bench.server.push(push(1))
    await bench.server.add_engine("main-1")
    await bench.server.stop()
