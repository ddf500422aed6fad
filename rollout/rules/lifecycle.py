"""The lifecycle as one table: phases, commands, and which command leads where.

Always true: a group is in exactly one phase.  A command is in the table for that phase, or repeats
the command that led into it (then it does nothing), or is refused.  This module only decides;
``ServerGroup`` executes the commands.

The order of the commands is the one that SGLang needs: ``engines/fake/README.md`` has a table of
what it does otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engines.protocol import WorkerType
from rollout.config import LifecycleConfig, WeightUpdate
from rollout.core.errors import LifecycleError
from rollout.core.types import EngineStatus, GroupStatus


class Phase(StrEnum):
    """The phase of a group; no command is legal while it is starting."""

    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    FLUSHED = "flushed"
    OFFLOADED = "offloaded"
    WEIGHTS_ONLOADED = "weights_onloaded"
    WEIGHTS_UPDATED = "weights_updated"
    VERIFIED = "verified"
    KV_ONLOADED = "kv_onloaded"


class Command(StrEnum):
    """What moves a group from one phase to the next; each is a method of ``policy.phases``.

    Attributes:
        PAUSE_GENERATION: stop all generation; what becomes of requests in flight is
            ``lifecycle.drain``.
        FLUSH_CACHE: wait until nothing is in flight, and drop the prefix caches.
        RELEASE_MEMORY_OCCUPATION: give the memory back, and measure that it came free.
        ONLOAD_WEIGHTS: take the memory of the weights back; its contents are not trusted yet.
        SNAPSHOT: let every engine keep a copy of its weights, to compare with after a push.
        UPDATE_WEIGHTS: give every engine the new weights; without a push, those that are published,
            from a weight source, where a release has discarded them.
        VERIFY: check that every engine holds the published weight version.
        ONLOAD_KV: take the memory of KV caches and CUDA graphs back.
        CONTINUE_GENERATION: generate again; the gate is still shut.
    """

    PAUSE_GENERATION = "pause_generation"
    FLUSH_CACHE = "flush_cache"
    RELEASE_MEMORY_OCCUPATION = "release_memory_occupation"
    ONLOAD_WEIGHTS = "onload_weights"
    SNAPSHOT = "snapshot"
    UPDATE_WEIGHTS = "update_weights"
    VERIFY = "verify"
    ONLOAD_KV = "onload_kv"
    CONTINUE_GENERATION = "continue_generation"


@dataclass(frozen=True, slots=True)
class GroupTraits:
    """The properties of a group that decide which commands it gets.

    Attributes:
        needs_offload: it shares its GPUs with the trainer and releases their memory each step.
        is_frozen: its weights never change (a reference, reward or judge model).
        weights_survive: released weights are restored (CPU backup), so it can be verified without
            a push.
    """

    needs_offload: bool
    is_frozen: bool = False
    weights_survive: bool = False


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table.  ``only``: the groups that it applies to, or None for all groups."""

    phase: Phase
    command: Command
    target: Phase
    only: str | None = None


OFFLOADING = "groups that offload"
KEEPING = "groups that keep their GPUs"
SURVIVING = "groups whose weights survive a release"

_MOST_LISTED = 8

_P, _C = Phase, Command
TABLE: tuple[Transition, ...] = (
    Transition(_P.SERVING, _C.PAUSE_GENERATION, _P.PAUSED),
    Transition(_P.PAUSED, _C.FLUSH_CACHE, _P.FLUSHED),
    Transition(_P.PAUSED, _C.CONTINUE_GENERATION, _P.SERVING),
    Transition(_P.FLUSHED, _C.RELEASE_MEMORY_OCCUPATION, _P.OFFLOADED, OFFLOADING),
    Transition(_P.FLUSHED, _C.SNAPSHOT, _P.FLUSHED),
    Transition(_P.FLUSHED, _C.UPDATE_WEIGHTS, _P.WEIGHTS_UPDATED),
    Transition(_P.FLUSHED, _C.CONTINUE_GENERATION, _P.SERVING),
    Transition(_P.OFFLOADED, _C.ONLOAD_WEIGHTS, _P.WEIGHTS_ONLOADED, OFFLOADING),
    Transition(_P.WEIGHTS_ONLOADED, _C.UPDATE_WEIGHTS, _P.WEIGHTS_UPDATED, OFFLOADING),
    Transition(_P.WEIGHTS_ONLOADED, _C.VERIFY, _P.VERIFIED, SURVIVING),
    Transition(_P.WEIGHTS_ONLOADED, _C.RELEASE_MEMORY_OCCUPATION, _P.OFFLOADED, OFFLOADING),
    Transition(_P.WEIGHTS_UPDATED, _C.UPDATE_WEIGHTS, _P.WEIGHTS_UPDATED),
    Transition(_P.WEIGHTS_UPDATED, _C.VERIFY, _P.VERIFIED),
    Transition(_P.WEIGHTS_UPDATED, _C.RELEASE_MEMORY_OCCUPATION, _P.OFFLOADED, OFFLOADING),
    Transition(_P.VERIFIED, _C.ONLOAD_KV, _P.KV_ONLOADED, OFFLOADING),
    Transition(_P.VERIFIED, _C.CONTINUE_GENERATION, _P.SERVING, KEEPING),
    # Engines that die here come back without weights, and only a push leads out.
    Transition(_P.VERIFIED, _C.UPDATE_WEIGHTS, _P.WEIGHTS_UPDATED),
    Transition(_P.VERIFIED, _C.RELEASE_MEMORY_OCCUPATION, _P.OFFLOADED, OFFLOADING),
    Transition(_P.KV_ONLOADED, _C.UPDATE_WEIGHTS, _P.WEIGHTS_UPDATED),
    Transition(_P.KV_ONLOADED, _C.RELEASE_MEMORY_OCCUPATION, _P.OFFLOADED, OFFLOADING),
    Transition(_P.KV_ONLOADED, _C.CONTINUE_GENERATION, _P.SERVING),
)

# Each of these leads to its end from every phase, if each command goes to the groups that need it.
MAKE_IDLE = (Command.PAUSE_GENERATION, Command.FLUSH_CACHE)
OFFLOAD = (*MAKE_IDLE, Command.RELEASE_MEMORY_OCCUPATION)
SERVE_UPDATED = (Command.VERIFY, Command.ONLOAD_KV, Command.CONTINUE_GENERATION)
SERVE = (Command.ONLOAD_WEIGHTS, Command.UPDATE_WEIGHTS, *SERVE_UPDATED)
PUSH = (*MAKE_IDLE, *SERVE)
TAKE_MEMORY = (Command.ONLOAD_WEIGHTS, Command.ONLOAD_KV)
MOVE_MEMORY = (Command.RELEASE_MEMORY_OCCUPATION, *TAKE_MEMORY)
STAGE = "stage_adapter"
"""No command: engines load a version of an adapter and verify it in every phase that serves."""

# Each of these does something whenever it runs; both are for weights that change.
_AFRESH = (Command.SNAPSHOT, Command.UPDATE_WEIGHTS)

# The phase that each command ends in, to detect a repeated command.
_ENDS_IN: dict[Command, Phase] = {row.command: row.target for row in TABLE}


def _applies(row: Transition, traits: GroupTraits) -> bool:
    if row.command in _AFRESH and traits.is_frozen:
        return False
    applies_to = {
        OFFLOADING: traits.needs_offload,
        KEEPING: not traits.needs_offload,
        SURVIVING: traits.weights_survive,
    }
    return row.only is None or applies_to[row.only]


def budget_s(command: Command, budgets: LifecycleConfig, *, is_path_check: bool = False) -> float:
    """Seconds that every engine has for ``command``.

    Args:
        is_path_check: it is a push whose path is checked: the weights are reset before it, and
            compared after it.
    """
    if is_path_check:
        return 3 * budgets.update_timeout_s
    return {
        Command.RELEASE_MEMORY_OCCUPATION: budgets.memory_timeout_s,
        Command.ONLOAD_WEIGHTS: budgets.memory_timeout_s,
        Command.SNAPSHOT: budgets.update_timeout_s,
        Command.UPDATE_WEIGHTS: budgets.update_timeout_s,
        Command.ONLOAD_KV: budgets.memory_timeout_s,
    }.get(command, budgets.command_timeout_s)


def legal_commands(phase: Phase, traits: GroupTraits) -> tuple[Command, ...]:
    """The commands that lead out of ``phase`` for a group with these traits."""
    return tuple(row.command for row in TABLE if row.phase is phase and _applies(row, traits))


def is_repeat(phase: Phase, command: Command) -> bool:
    """Whether ``command`` led into ``phase``, so that it has nothing to do.

    A second ``update_weights`` is never a repeat: it sends other weights.
    """
    return _ENDS_IN[command] is phase and command not in _AFRESH


def groups_that_need(
    command: Command, phases: Mapping[str, Phase], traits: Mapping[str, GroupTraits]
) -> list[str]:
    """The groups of a server that still need ``command`` in a transition.

    A push goes to all groups; ``update_weights`` is needed where nothing else brings weights.
    """
    return [name for name in phases if _needs(command, phases[name], traits[name])]


# In these phases a group needs no verification: it was only paused, or is verified.
_VERIFIED = (Phase.SERVING, Phase.PAUSED, Phase.FLUSHED, Phase.VERIFIED, Phase.KV_ONLOADED)
# In these, a group has no weights, unless they survive a release.
_RELEASED = (Phase.OFFLOADED, Phase.WEIGHTS_ONLOADED)
# In these, requests may be in flight, so no memory may be released.
_NOT_IDLE = (Phase.STARTING, Phase.SERVING, Phase.PAUSED)


def _needs(command: Command, phase: Phase, traits: GroupTraits) -> bool:
    if command is Command.UPDATE_WEIGHTS:
        return phase in _RELEASED and not traits.weights_survive
    if command is Command.VERIFY:
        return phase not in _VERIFIED
    if command is Command.CONTINUE_GENERATION:
        return phase is not Phase.SERVING
    if command is Command.RELEASE_MEMORY_OCCUPATION:
        # An offloaded group gets the command again, which does nothing.  But if an earlier resume
        # arrived late, after its caller had given up, only the group itself knows of it.
        return traits.needs_offload and phase not in _NOT_IDLE
    return command in legal_commands(phase, traits)


def must_finish(command: Command | None) -> bool:
    """Whether a command during which a group was lost is run again on its engines.

    Each of them does nothing twice.  Of the others, verify changes nothing, and the engines are not
    reused after a push or a snapshot: half of it looks like a whole one.
    """
    return command not in (None, Command.VERIFY, *_AFRESH)


def least_known(before: Command | None, command: Command) -> Command:
    """The riskier of two unfinished commands.

    A half-run push outranks a half-run memory command, which outranks the rest.
    """
    for kinds in (_AFRESH, MOVE_MEMORY):
        if before is not None and before in kinds:
            return before
        if command in kinds:
            return command
    return command


def spoils_weights(command: Command | None) -> bool:
    """Whether the weights of an engine are unknown after half of this command."""
    return command in _AFRESH


def hold_loaded_weights(phases: Iterable[Phase]) -> bool:
    """Whether no group has released or changed its weights since it served."""
    return all(phase in (Phase.SERVING, Phase.PAUSED, Phase.FLUSHED) for phase in phases)


def up_to(last: Command, commands: Sequence[Command]) -> Sequence[Command]:
    """The part of ``commands`` that ends with ``last``."""
    return commands[: commands.index(last) + 1]


def check_started(phases: Mapping[str, Phase]) -> None:
    """Check that every group has started.

    Raises:
        LifecycleError: a group has not; the message names it.
    """
    for name, phase in phases.items():
        if phase is Phase.STARTING:
            raise LifecycleError(f"group {name} is still {phase}", phase=phase)


def check_restorable(
    phases: Mapping[str, Phase], traits: Mapping[str, GroupTraits], why_not: Mapping[str, str]
) -> None:
    """Check that what a release has discarded can be had without a push.

    Args:
        why_not: group without weights -> why no source can give it the published ones, or
            empty if one can.

    Raises:
        LifecycleError: a group without weights cannot get them.
    """
    for name, why in why_not.items():
        if why:
            raise LifecycleError(
                f"cannot serve while {phases[name]}: the release discarded the weights of group "
                f"{name}, and {why}; so push them: with window.push(weights) in an offload window, "
                "else with push(weights). To serve them again without a push, launch with "
                "engine.weights_cpu_backup: true, or with weights.store: true, which keeps what "
                "was pushed",
                command="serve",
                phase=phases[name],
                legal=legal_commands(phases[name], traits[name]),
            )


def why_unfit(engine: EngineStatus, version: int) -> str:
    """Why an engine must get no request, whatever else is recorded of it.

    Args:
        version: the published one of what engines report, which adapters leave as it is.
    """
    if engine.released:
        return f"it has {', '.join(engine.released)} released"
    if engine.is_paused:
        return "its generation is paused"
    if not engine.is_verified:
        return "its weights are not verified"
    if engine.weight_version != version:
        return f"it holds weight version {engine.weight_version}, and {version} is published"
    return ""


def why_none_serves(groups: Iterable[GroupStatus], version: int, update: WeightUpdate) -> str:
    """Why no engine of a server could serve, and what leads out."""
    engines = [(group.worker_type, engine) for group in groups for engine in group.engines]
    serving = {kind for kind, engine in engines if not (engine.fence_reason or engine.is_stale)}
    kinds = {kind for kind, _ in engines}
    # Prefill and decode engines serve only together.
    if WorkerType.REGULAR in serving or (kinds and kinds <= serving):
        return ""
    stale = [
        engine.engine_id for _, engine in engines if engine.is_stale and not engine.fence_reason
    ]
    fenced = [engine.fence_reason for _, engine in engines if engine.fence_reason]
    parts = [f"{_listed(stale)} restarted and lack weight version {version}"] if stale else []
    why = "; ".join([*parts, *fenced[:_MOST_LISTED]]) or "the server has no engine"
    return f"no engine can serve: {why}; {_way_out(bool(stale), version, update)}"


def _way_out(is_any_stale: bool, version: int, update: WeightUpdate) -> str:
    if not is_any_stale:
        return "launch again, or wait until recovery has restarted one (health.recover)"
    if update is WeightUpdate.FULL:
        return (
            f"push version {version + 1} with push(weights), or {version} again if it has not "
            "served yet"
        )
    if update is WeightUpdate.FROZEN:
        return "repeat the command when recovery has verified one"
    if update is WeightUpdate.LORA:
        return "push the adapter again, and before it the base if one was pushed (is_base=True)"
    return (
        "a push of some tensors does not restore the others: set weights.store or "
        "health.weights_path, or launch again"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def next_phase(phase: Phase, command: Command, traits: GroupTraits) -> Phase:
    """The phase after ``command``.

    Raises:
        LifecycleError: the command is not legal in ``phase``; the message lists those that are.
    """
    for row in TABLE:
        if row.phase is phase and row.command is command and _applies(row, traits):
            return row.target
    legal = legal_commands(phase, traits)
    is_unpushed = phase is Phase.WEIGHTS_ONLOADED and command is Command.VERIFY
    why = (
        ": the release discarded the weights, so push them first, with push(weights), or call "
        "serve(), which gets them from the weight store"
        if is_unpushed
        else ""
    )
    raise LifecycleError(
        f"cannot {command} while {phase}{why}; legal now: {', '.join(legal) or 'nothing'}",
        command=command,
        phase=phase,
        legal=legal,
    )


def server_phase(phases: Iterable[Phase]) -> Phase | None:
    """The common phase of all groups of a server, or None if they differ."""
    distinct = set(phases)
    return distinct.pop() if len(distinct) == 1 else None


def diagram() -> str:
    """The table as a Mermaid state diagram, for the README."""
    lines = ["stateDiagram-v2", "    [*] --> serving"]
    for row in TABLE:
        note = f" ({row.only})" if row.only else ""
        lines.append(f"    {row.phase} --> {row.target}: {row.command}{note}")
    return "\n".join(lines)
