"""Every phase x every command x every kind of group, against a table written by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest

from engines.protocol import Endpoint, WorkerType
from rollout.config import WeightUpdate
from rollout.core.errors import LifecycleError
from rollout.core.types import EngineStatus, GroupStatus
from rollout.rules import lifecycle
from rollout.rules.lifecycle import Command, GroupTraits, Phase

OFFLOADS = GroupTraits(needs_offload=True)
BACKED_UP = GroupTraits(needs_offload=True, weights_survive=True)
FROZEN = GroupTraits(needs_offload=True, is_frozen=True, weights_survive=True)
KEEPS = GroupTraits(needs_offload=False, weights_survive=True)
FROZEN_KEEPS = GroupTraits(needs_offload=False, is_frozen=True, weights_survive=True)
KINDS = {
    "offloads": OFFLOADS,
    "backed_up": BACKED_UP,
    "frozen": FROZEN,
    "keeps": KEEPS,
    "frozen_keeps": FROZEN_KEEPS,
}

ALL = frozenset(KINDS)
OFFLOADING = frozenset({"offloads", "backed_up", "frozen"})
# phase, command -> phase after it, kinds of group it is legal for
LEGAL = {
    ("serving", "pause_generation"): ("paused", ALL),
    ("paused", "flush_cache"): ("flushed", ALL),
    ("paused", "continue_generation"): ("serving", ALL),
    ("flushed", "release_memory_occupation"): ("offloaded", OFFLOADING),
    ("flushed", "snapshot"): ("flushed", ALL - {"frozen", "frozen_keeps"}),
    ("flushed", "update_weights"): ("weights_updated", ALL - {"frozen", "frozen_keeps"}),
    ("flushed", "continue_generation"): ("serving", ALL),
    ("offloaded", "onload_weights"): ("weights_onloaded", OFFLOADING),
    ("weights_onloaded", "update_weights"): ("weights_updated", {"offloads", "backed_up"}),
    ("weights_onloaded", "verify"): ("verified", ALL - {"offloads"}),
    ("weights_updated", "update_weights"): ("weights_updated", ALL - {"frozen", "frozen_keeps"}),
    ("weights_updated", "verify"): ("verified", ALL),
    ("verified", "update_weights"): ("weights_updated", ALL - {"frozen", "frozen_keeps"}),
    ("kv_onloaded", "update_weights"): ("weights_updated", ALL - {"frozen", "frozen_keeps"}),
    ("verified", "onload_kv"): ("kv_onloaded", OFFLOADING),
    ("verified", "continue_generation"): ("serving", {"keeps", "frozen_keeps"}),
    ("weights_onloaded", "release_memory_occupation"): ("offloaded", OFFLOADING),
    ("weights_updated", "release_memory_occupation"): ("offloaded", OFFLOADING),
    ("verified", "release_memory_occupation"): ("offloaded", OFFLOADING),
    ("kv_onloaded", "release_memory_occupation"): ("offloaded", OFFLOADING),
    ("kv_onloaded", "continue_generation"): ("serving", ALL),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("phase", "command"), list(product(Phase, Command)))
def test_every_phase_with_every_command(phase: Phase, command: Command, kind: str) -> None:
    target, kinds = LEGAL.get((phase.value, command.value), ("", frozenset()))
    if kind in kinds:
        assert lifecycle.next_phase(phase, command, KINDS[kind]) == target
        assert command in lifecycle.legal_commands(phase, KINDS[kind])
        return
    assert command not in lifecycle.legal_commands(phase, KINDS[kind])
    with pytest.raises(LifecycleError) as caught:
        lifecycle.next_phase(phase, command, KINDS[kind])
    assert caught.value.legal == lifecycle.legal_commands(phase, KINDS[kind])
    assert command not in caught.value.legal


def test_a_refusal_lists_what_is_legal_now() -> None:
    message = (
        "^cannot release_memory_occupation while paused; "
        r"legal now: flush_cache, continue_generation$"
    )
    with pytest.raises(LifecycleError, match=message):
        lifecycle.next_phase(Phase.PAUSED, Command.RELEASE_MEMORY_OCCUPATION, OFFLOADS)


def phases_reached_from(phase: Phase, traits: GroupTraits) -> set[Phase]:
    reached = {phase}
    while True:
        more = {
            lifecycle.next_phase(phase, command, traits)
            for phase in reached
            for command in lifecycle.legal_commands(phase, traits)
        }
        if more <= reached:
            return reached
        reached |= more


@pytest.mark.parametrize("kind", KINDS)
def test_from_wherever_a_group_can_get_to_it_can_serve_again(kind: str) -> None:
    for phase in phases_reached_from(Phase.SERVING, KINDS[kind]):
        assert Phase.SERVING in phases_reached_from(phase, KINDS[kind])


@pytest.mark.parametrize(("phase", "command"), list(product(Phase, Command)))
def test_a_repeat_is_the_command_that_led_here(phase: Phase, command: Command) -> None:
    led_here = {command for (_, command), (target, _) in LEGAL.items() if target == phase.value}
    expected = command.value in led_here - {"snapshot", "update_weights"}
    assert lifecycle.is_repeat(phase, command) == expected


def test_nothing_serves_after_an_unbacked_release_without_an_update() -> None:
    legal = lifecycle.legal_commands(Phase.WEIGHTS_ONLOADED, OFFLOADS)
    assert legal == (Command.UPDATE_WEIGHTS, Command.RELEASE_MEMORY_OCCUPATION)


# -- one call that leads there from every phase -------------------------------------------------


def phases_after(
    commands: Sequence[Command],
    phases: Mapping[str, Phase],
    traits: Mapping[str, GroupTraits],
    *,
    is_push: bool = False,
) -> dict[str, Phase]:
    """The phases of the groups of a server after each command on those that need it, and after
    the update of a push on all."""
    after = dict(phases)
    for command in commands:
        is_for_all = is_push and command is Command.UPDATE_WEIGHTS
        needing = lifecycle.groups_that_need(command, after, traits)
        for name in after if is_for_all else needing:
            if not lifecycle.is_repeat(after[name], command):
                after[name] = lifecycle.next_phase(after[name], command, traits[name])
    return after


PAIRS = [
    {"first": KINDS[first], "second": KINDS[second]}
    for first, second in [*product(("offloads", "backed_up", "keeps"), repeat=2), ("frozen",) * 2]
]
PHASES_OF_PAIRS = [
    (traits, dict(zip(traits, phases, strict=True)))
    for traits in PAIRS
    for phases in product(
        *(sorted(phases_reached_from(Phase.SERVING, one)) for one in traits.values())
    )
]


def test_new_weights_serve_after_push_wherever_two_groups_are() -> None:
    for traits, phases in PHASES_OF_PAIRS:
        if not any(one.is_frozen for one in traits.values()):
            after = phases_after(lifecycle.PUSH, phases, traits, is_push=True)
            assert set(after.values()) == {Phase.SERVING}, phases
            updated = lifecycle.up_to(Command.UPDATE_WEIGHTS, lifecycle.PUSH)
            between = phases_after(updated, phases, traits, is_push=True)
            assert set(between.values()) == {Phase.WEIGHTS_UPDATED}, phases


def test_memory_is_released_after_offload_wherever_two_groups_are() -> None:
    for traits, phases in PHASES_OF_PAIRS:
        after = phases_after(lifecycle.OFFLOAD, phases, traits)
        offloaded = {name for name, phase in after.items() if phase is Phase.OFFLOADED}
        assert offloaded == {name for name, one in traits.items() if one.needs_offload}, phases
        assert Phase.SERVING not in after.values()
        assert phases_after(lifecycle.OFFLOAD, after, traits) == after


def test_weights_serve_after_serve_wherever_two_groups_are() -> None:
    for traits, phases in PHASES_OF_PAIRS:
        after = phases_after(lifecycle.SERVE, phases, traits)
        assert set(after.values()) == {Phase.SERVING}, phases


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", Phase)
def test_only_what_a_release_has_discarded_needs_other_weights(phase: Phase, kind: str) -> None:
    needing = lifecycle.groups_that_need(
        Command.UPDATE_WEIGHTS, {"main": phase}, {"main": KINDS[kind]}
    )
    is_empty = phase in (Phase.OFFLOADED, Phase.WEIGHTS_ONLOADED)
    assert needing == (["main"] if is_empty and kind == "offloads" else [])


def test_what_no_source_has_is_refused_with_the_settings_that_would_keep_it() -> None:
    phases = {"main": Phase.OFFLOADED, "other": Phase.WEIGHTS_ONLOADED}
    traits = dict.fromkeys(phases, OFFLOADS)
    lifecycle.check_restorable(phases, traits, {"main": "", "other": ""})
    with pytest.raises(LifecycleError) as caught:
        lifecycle.check_restorable(phases, traits, {"main": "", "other": "the store keeps nothing"})
    assert str(caught.value) == (
        "cannot serve while weights_onloaded: the release discarded the weights of group other, "
        "and the store keeps nothing; so push them: with window.push(weights) in an offload "
        "window, else with push(weights). To serve them again without a push, launch with "
        "engine.weights_cpu_backup: true, or with weights.store: true, which keeps what was pushed"
    )
    assert caught.value.legal == (Command.UPDATE_WEIGHTS, Command.RELEASE_MEMORY_OCCUPATION)


def test_no_call_runs_before_every_group_has_started() -> None:
    lifecycle.check_started({"main": Phase.SERVING})
    with pytest.raises(LifecycleError, match="group main is still starting"):
        lifecycle.check_started({"other": Phase.SERVING, "main": Phase.STARTING})


def test_a_server_has_a_phase_only_when_its_groups_agree() -> None:
    assert lifecycle.server_phase([Phase.PAUSED, Phase.PAUSED]) is Phase.PAUSED
    assert lifecycle.server_phase([Phase.PAUSED, Phase.FLUSHED]) is None
    assert lifecycle.server_phase([]) is None


def test_the_diagram_has_a_line_for_every_row() -> None:
    diagram = lifecycle.diagram().splitlines()
    assert len(diagram) == 2 + len(LEGAL)
    assert "    flushed --> offloaded: release_memory_occupation (groups that offload)" in diagram


# -- which engines can serve ----------------------------------------------------------------------


def group(worker_type: WorkerType, *states: str) -> GroupStatus:
    """A group whose engines serve, or are ``stale`` or ``fenced``."""
    engines = tuple(
        EngineStatus(
            f"{worker_type}-{index}",
            Endpoint("127.0.0.1", 1),
            state,
            3,
            (),
            "local",
            fence_reason="it died" if state == "fenced" else "",
            is_stale=state == "stale",
        )
        for index, state in enumerate(states)
    )
    return GroupStatus(worker_type.value, worker_type, "serving", True, engines)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"state": "paused"}, ""),  # what its group is in decides nothing
        ({"released": ("weights",)}, "it has weights released"),
        ({"released": ("cuda_graph", "kv_cache")}, "it has cuda_graph, kv_cache released"),
        ({"is_paused": True}, "its generation is paused"),
        ({"is_verified": False}, "its weights are not verified"),
        ({"weight_version": 2}, "it holds weight version 2, and 3 is published"),
        ({"weight_version": 4}, "it holds weight version 4, and 3 is published"),
        ({"weight_version": None}, "it holds weight version None, and 3 is published"),
    ],
)
def test_an_engine_that_lacks_anything_is_unfit_whatever_is_recorded_of_it(
    change: Mapping[str, object], why: str
) -> None:
    (engine,) = group(REGULAR, "serving").engines
    assert lifecycle.why_unfit(replace(engine, **change), 3) == why


REGULAR, PREFILL, DECODE = WorkerType.REGULAR, WorkerType.PREFILL, WorkerType.DECODE


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([group(REGULAR, "serving", "stale")], ""),
        ([group(REGULAR, "stale"), group(WorkerType.ENCODER, "serving")], "regular-0 restarted"),
        ([group(REGULAR, "stale", "fenced")], "lack weight version 3; it died; push version 4"),
        ([group(REGULAR, "fenced")], "it died; launch again"),
        ([group(PREFILL, "serving"), group(DECODE, "serving")], ""),
        ([group(PREFILL, "serving"), group(DECODE, "stale")], "decode-0 restarted"),
        ([group(WorkerType.ENCODER, "serving")], ""),
        ([], "the server has no engine"),
    ],
)
def test_a_server_can_serve_with_one_engine_that_holds_the_weights(groups, why: str) -> None:
    said = lifecycle.why_none_serves(groups, 3, WeightUpdate.FULL)
    assert why in said
    assert bool(said) == bool(why)


@pytest.mark.parametrize(
    ("update", "way_out"),
    [
        (WeightUpdate.FULL, "push version 4 with push(weights), or 3 again if it has not served"),
        (WeightUpdate.PARTIAL, "weights.store"),
        (WeightUpdate.LORA, "push the adapter again"),
        (WeightUpdate.FROZEN, "repeat the command"),
    ],
)
def test_the_error_names_what_leads_out(update: WeightUpdate, way_out: str) -> None:
    assert way_out in lifecycle.why_none_serves([group(REGULAR, "stale")], 3, update)


@pytest.mark.parametrize(
    ("before", "command", "unfinished"),
    [
        (None, Command.PAUSE_GENERATION, Command.PAUSE_GENERATION),
        (Command.PAUSE_GENERATION, Command.FLUSH_CACHE, Command.FLUSH_CACHE),
        (
            Command.RELEASE_MEMORY_OCCUPATION,
            Command.CONTINUE_GENERATION,
            Command.RELEASE_MEMORY_OCCUPATION,
        ),
        (Command.ONLOAD_WEIGHTS, Command.RELEASE_MEMORY_OCCUPATION, Command.ONLOAD_WEIGHTS),
        (Command.RELEASE_MEMORY_OCCUPATION, Command.UPDATE_WEIGHTS, Command.UPDATE_WEIGHTS),
        (Command.UPDATE_WEIGHTS, Command.RELEASE_MEMORY_OCCUPATION, Command.UPDATE_WEIGHTS),
    ],
)
def test_of_two_commands_that_failed_the_one_counts_that_leaves_less_known(
    before: Command | None, command: Command, unfinished: Command
) -> None:
    assert lifecycle.least_known(before, command) is unfinished
