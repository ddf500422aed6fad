"""A group in the place of a lost one reuses the engines that confirm their state, and no others."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeLauncher
from engines.fake.launcher import make_engine
from engines.protocol import MemoryTag, PauseMode
from rollout.control.group.engine_recovery import _SAYS, LostState, _terms, _Unreported
from rollout.control.group.server_group import ServerGroup
from rollout.core.errors import RolloutError
from rollout.rules.lifecycle import (
    MOVE_MEMORY,
    OFFLOAD,
    PUSH,
    SERVE_UPDATED,
    Command,
    GroupTraits,
    Phase,
    groups_that_need,
)
from tests.support.builders import make_group, push, restart, write_checkpoint
from tests.support.virtual_time import pass_time, virtual_time

TRAITS = {"main": GroupTraits(needs_offload=True)}
COMMANDS = (*OFFLOAD, Command.ONLOAD_WEIGHTS, Command.UPDATE_WEIGHTS, *SERVE_UPDATED)


REPORTS = pytest.mark.parametrize("reports", [True, False], ids=["reports", "as SGLang"])


def proving(*, reports: bool = True) -> tuple[ServerGroup, FakeLauncher]:
    """A group whose engines report what they have released, or do not."""
    return make_group(2, launcher=FakeLauncher(partial(make_engine, reports_released=reports)))


async def walk(group: ServerGroup, commands: tuple[Command, ...], version: int) -> None:
    for command in commands:
        await group.run(command, push=push(version), version=version)


async def taken_over(
    lost: ServerGroup,
    launcher: FakeLauncher,
    version: int,
    unfinished: Command | None = None,
) -> ServerGroup:
    """Another group with the engines of this one, which is never called again."""
    group, _ = make_group(2, launcher=launcher)
    state = LostState(await lost.status(), unfinished, version)
    await group.take_over(state, launcher.processes)
    return group


async def serves(group: ServerGroup, version: int, num_engines: int = 2) -> None:
    """From any phase, with a push: what a repeated call does."""
    name = group.name
    for command in PUSH:
        phases = {name: Phase((await group.status()).phase)}
        if command is Command.UPDATE_WEIGHTS or groups_that_need(command, phases, TRAITS):
            await group.run(command, push=push(version), version=version)
    status = await group.status()
    assert status.phase == "serving"
    engines = [one for one in status.engines if not one.fence_reason]
    assert [one.weight_version for one in engines] == [version] * num_engines
    assert all(one.is_verified for one in engines)


def test_each_phase_says_something_of_the_engines() -> None:
    assert _SAYS.keys() == set(Phase)


@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.parametrize("unfinished", [None, *Command])
@pytest.mark.parametrize("phase", Phase)
async def test_what_was_released_is_guessed_for_no_engine(
    phase: Phase, unfinished: Command | None, is_attached: bool
) -> None:
    group, _ = proving()
    await group.start()
    status = replace(await group.status(), phase=phase.value)
    lost = LostState(status, unfinished, 0)
    if unfinished in (Command.UPDATE_WEIGHTS, Command.SNAPSHOT):
        with pytest.raises(RolloutError, match="had begun"):
            _terms(lost, TRAITS["main"], is_attached=is_attached)
        return
    terms = _terms(lost, TRAITS["main"], is_attached=is_attached)
    moves = unfinished in MOVE_MEMORY
    may_be_either = phase in (Phase.WEIGHTS_UPDATED, Phase.VERIFIED)
    assert (terms.unreported is _Unreported.UNKNOWN) == (may_be_either or (moves and is_attached))
    assert terms.unreported is not _Unreported.REPEATED or moves
    assert terms.is_at_rest == (unfinished is None)


@virtual_time
@REPORTS
@pytest.mark.parametrize("num", range(len(COMMANDS) + 1))
async def test_at_rest_in_any_phase_all_engines_are_reused(num: int, reports: bool) -> None:
    lost, launcher = proving(reports=reports)
    await lost.start()
    await walk(lost, COMMANDS[:num], 1)
    status = await lost.status()
    version = 1 if num > COMMANDS.index(Command.UPDATE_WEIGHTS) else 0
    group = await taken_over(lost, launcher, version)
    if not reports and status.phase in ("weights_updated", "verified"):
        # The phase does not say whether the group was offloaded before the push.
        assert all(one.fence_reason for one in (await group.status()).engines)
        return
    assert [one.fence_reason for one in (await group.status()).engines] == ["", ""]
    assert (await group.status()).phase == status.phase
    assert [one.released for one in (await group.status()).engines] == [
        one.released for one in status.engines
    ]
    await serves(group, 2)
    assert len(launcher.specs) == 2


UNDER_WAY = {
    Command.PAUSE_GENERATION: ("pause_generation", [PauseMode.ABORT]),
    Command.FLUSH_CACHE: ("flush_cache", []),
    Command.RELEASE_MEMORY_OCCUPATION: ("release_memory_occupation", [list(MemoryTag)]),
    Command.ONLOAD_WEIGHTS: ("resume_memory_occupation", [[MemoryTag.WEIGHTS]]),
    Command.ONLOAD_KV: (
        "resume_memory_occupation",
        [[tag for tag in MemoryTag if tag is not MemoryTag.WEIGHTS]],
    ),
    Command.CONTINUE_GENERATION: ("continue_generation", []),
    Command.VERIFY: ("weights_checker", []),
}


@virtual_time
@pytest.mark.parametrize("command", UNDER_WAY)
async def test_a_command_under_way_is_finished_on_the_engines_that_had_not(
    command: Command,
) -> None:
    lost, launcher = proving()
    await lost.start()
    await walk(lost, COMMANDS[: COMMANDS.index(command)], 1)
    version = 1 if COMMANDS.index(command) > COMMANDS.index(Command.UPDATE_WEIGHTS) else 0
    method, args = UNDER_WAY[command]
    engine = launcher["main-0"]
    await getattr(engine, method)(*args)
    group = await taken_over(lost, launcher, version, command)
    status = await group.status()
    assert [one.fence_reason for one in status.engines] == ["", ""]
    assert len({one.released for one in status.engines}) == 1
    await serves(group, 2)
    assert len(launcher.specs) == 2


@virtual_time
async def test_after_half_a_push_no_engine_is_believed() -> None:
    lost, launcher = proving()
    await lost.start()
    await walk(lost, COMMANDS[:4], 1)
    group = await taken_over(lost, launcher, 0, Command.UPDATE_WEIGHTS)
    engines = (await group.status()).engines
    assert all("update_weights had begun" in one.fence_reason for one in engines)
    assert all(launcher[one.engine_id].death_reason for one in engines)


@virtual_time
@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("update_weight_version", "it holds weight version 7, not 0"),
        ("pause_generation", "it takes no requests, and its group is serving"),
        ("die", "it is dead"),
    ],
)
async def test_an_engine_that_is_not_as_the_record_says_is_ended(lie: str, why: str) -> None:
    lost, launcher = proving()
    await lost.start()
    engine = launcher["main-1"]
    if lie == "die":
        engine.die("it is dead")
        why = "ended"
    elif lie == "pause_generation":
        await engine.pause_generation(PauseMode.ABORT)
    else:
        await engine.update_weight_version("7")
    group = await taken_over(lost, launcher, 0)
    believed, fenced = (await group.status()).engines
    assert believed.fence_reason == ""
    assert why in fenced.fence_reason
    assert engine.death_reason


@virtual_time
async def test_an_engine_that_has_released_what_its_group_uses_is_ended() -> None:
    lost, launcher = proving()
    await lost.start()
    await walk(lost, (Command.PAUSE_GENERATION, Command.FLUSH_CACHE), 0)
    await launcher["main-1"].release_memory_occupation(list(MemoryTag))
    group = await taken_over(lost, launcher, 0)
    believed, fenced = (await group.status()).engines
    assert believed.fence_reason == ""
    assert "and its group is flushed" in fenced.fence_reason


MOVES = [Command.RELEASE_MEMORY_OCCUPATION, Command.ONLOAD_WEIGHTS]


@virtual_time
@pytest.mark.parametrize("command", MOVES)
@pytest.mark.parametrize("num_done", [2, 1, 0])
async def test_an_engine_that_does_not_report_its_memory_stays_if_it_had_got_the_command(
    command: Command, num_done: int
) -> None:
    lost, launcher = proving(reports=False)
    await lost.start()
    await walk(lost, COMMANDS[: COMMANDS.index(command)], 1)
    method, args = UNDER_WAY[command]
    for name in ["main-0", "main-1"][:num_done]:
        await getattr(launcher[name], method)(*args)
    group = await taken_over(lost, launcher, 0, command)
    status = await group.status()
    has_stayed = [not one.fence_reason for one in status.engines]
    assert has_stayed == [num < num_done for num in range(2)]
    assert [not launcher[one.engine_id].death_reason for one in status.engines] == has_stayed
    # Where none is left, none holds memory: the trainer may have it without a boot.
    if num_done or command is Command.RELEASE_MEMORY_OCCUPATION:
        await group.run(command)
    if num_done:
        await serves(group, 2, num_done)
    else:
        assert (await group.status()).phase == Phase.OFFLOADED
    assert len(launcher.specs) == 2


@virtual_time
async def test_an_attached_engine_that_does_not_report_its_memory_is_left_as_it_is() -> None:
    launcher = FakeLauncher()
    attached = {"kind": "attached", "urls": ["http://host:1", "http://host:2"]}
    lost, _ = make_group(2, launcher=launcher, engine=attached)
    await lost.start()
    await walk(lost, (Command.PAUSE_GENERATION, Command.FLUSH_CACHE), 0)
    await launcher["main-0"].release_memory_occupation(list(MemoryTag))
    group, _ = make_group(2, launcher=launcher, engine=attached)
    state = LostState(await lost.status(), Command.RELEASE_MEMORY_OCCUPATION, 0)
    await group.take_over(state, launcher.processes)
    reasons = [one.fence_reason for one in (await group.status()).engines]
    assert all("does not report what memory it has released" in reason for reason in reasons)


@virtual_time
async def test_an_attached_engine_that_was_replaced_meanwhile_is_not_taken_over() -> None:
    launcher = FakeLauncher()
    attached = {"kind": "attached", "urls": ["http://host:1", "http://host:2"]}
    lost, _ = make_group(2, launcher=launcher, engine=attached)
    await lost.start()
    known = await lost.status()
    launcher["main-0"].random_seed += 1
    group, _ = make_group(2, launcher=launcher, engine=attached)
    await group.take_over(LostState(known, None, 0), launcher.processes)
    reasons = {one.engine_id: one.fence_reason for one in (await group.status()).engines}
    assert "another process is in its place" in reasons["main-0"]
    assert reasons["main-1"] == ""


STANDBY: dict[str, Any] = {"num_engines": 1, "standby": 1, "health": {}}


async def with_standby(
    folder: Path, *, reports: bool = True, **group: Any
) -> tuple[ServerGroup, FakeLauncher]:
    """A group that serves with an engine and a standby, whose weights are on disk."""
    launcher = FakeLauncher(partial(make_engine, reports_released=reports))
    lost, _ = make_group(
        launcher=launcher, model_path=write_checkpoint(folder), **(STANDBY | group)
    )
    await lost.start()
    while not (await lost.status()).asleep:
        await lost.probe(1.0)
        await pass_time(0.1)
    return lost, launcher


async def successor(
    lost: ServerGroup, launcher: FakeLauncher, unfinished: Command | None = None, **more: Any
) -> ServerGroup:
    model_path = lost._settings.model_path
    group, _ = make_group(launcher=launcher, model_path=model_path, **(STANDBY | more))
    await group.take_over(LostState(await lost.status(), unfinished, 0), launcher.processes)
    return group


@virtual_time
@REPORTS
@pytest.mark.parametrize("num", [0, 3, 4], ids=["serving", "offloaded", "onloading"])
async def test_a_standby_of_a_lost_group_takes_a_place_without_a_boot(
    tmp_path: Path, num: int, reports: bool
) -> None:
    lost, launcher = await with_standby(tmp_path, reports=reports)
    await walk(lost, COMMANDS[:num], 1)
    group = await successor(lost, launcher)
    launcher["main-0"].die("killed -9")
    await group.fence("main-0", "it died")
    await restart(group, "main-0")
    (engine,) = (await group.status()).engines
    assert engine.endpoint == launcher["standby-main-0"].endpoint
    assert len(launcher.specs) == 2
    if not num:
        assert await group.readmit("main-0", 0)
    await serves(group, 2, 1)


@virtual_time
@REPORTS
async def test_half_a_push_ends_an_engine_and_not_the_standby(
    tmp_path: Path, reports: bool
) -> None:
    lost, launcher = await with_standby(tmp_path, reports=reports)
    await walk(lost, COMMANDS[:4], 1)
    group = await successor(lost, launcher, Command.UPDATE_WEIGHTS)
    assert launcher["main-0"].is_dead
    await restart(group, "main-0")
    await serves(group, 2, 1)
    assert len(launcher.specs) == 2


@virtual_time
@REPORTS
async def test_a_standby_beside_a_dead_engine_is_believed_if_it_reports(
    tmp_path: Path, reports: bool
) -> None:
    """It may have been woken before its group was lost."""
    lost, launcher = await with_standby(tmp_path, reports=reports)
    launcher["main-0"].die("killed -9")
    group = await successor(lost, launcher)
    assert launcher["standby-main-0"].is_dead != reports
    await restart(group, "main-0")
    assert len(launcher.specs) == (2 if reports else 3)


@virtual_time
@pytest.mark.parametrize("what", ["woken", "dead", "another"])
async def test_what_does_not_sleep_any_more_is_ended(tmp_path: Path, what: str) -> None:
    lost, launcher = await with_standby(tmp_path)
    state = LostState(await lost.status(), None, 0)
    standby = launcher["standby-main-0"]
    if what == "woken":
        await standby.resume_memory_occupation(list(MemoryTag))
    elif what == "dead":
        standby.die("killed -9")
    else:
        standby = (await launcher.launch(launcher.specs[-1])).engine
    group, _ = make_group(launcher=launcher, **STANDBY)
    await group.take_over(state, launcher.processes)
    assert standby.is_dead
    assert not (await group.status()).asleep
    assert [one.fence_reason for one in (await group.status()).engines] == [""]


@virtual_time
@REPORTS
@pytest.mark.parametrize("more", [{"update": "frozen"}, {"needs_offload": False}], ids=str)
async def test_a_standby_whose_weights_survive_a_release_loads_them_anew(
    tmp_path: Path, more: dict[str, Any], reports: bool
) -> None:
    lost, launcher = await with_standby(tmp_path, reports=reports, **more)
    group = await successor(lost, launcher, **more)
    await group.fence("main-0", "it died")
    await restart(group, "main-0")
    assert await group.readmit("main-0", 0)
    (engine,) = (await group.status()).engines
    assert engine.endpoint == launcher["standby-main-0"].endpoint
    assert "update_weights_from_disk" in [
        call.operation for call in launcher["standby-main-0"].calls
    ]
