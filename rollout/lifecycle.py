"""The lifecycle as one table: phases, commands, and which command leads where.

Always true: a group is in exactly one phase; a command either is in the table for that phase, or
repeats the command that led into it (and is then a no-op), or is refused.  Nothing here awaits,
reads a clock or touches a socket; ``ServerGroup`` carries out what this module decides.

The rows exist in this order because of what SGLang does when it is asked out of order: see the
table in ``engines/fake/README.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rollout.errors import LifecycleError


class Phase(StrEnum):
    """Where a group is."""

    SERVING = "serving"
    PAUSED = "paused"
    FLUSHED = "flushed"
    OFFLOADED = "offloaded"
    WEIGHTS_ONLOADED = "weights_onloaded"
    WEIGHTS_UPDATED = "weights_updated"
    VERIFIED = "verified"
    KV_ONLOADED = "kv_onloaded"


class Command(StrEnum):
    """What moves a group from one phase to the next."""

    PAUSE = "pause"
    FLUSH = "flush"
    RELEASE = "release"
    RESUME_WEIGHTS = "resume_weights"
    UPDATE_WEIGHTS = "update_weights"
    VERIFY = "verify"
    RESUME_KV = "resume_kv"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class Traits:
    """What of a group's configuration decides its way through the table.

    Attributes:
        needs_offload: it shares its GPUs with the trainer and gives them back each step.
        is_frozen: its weights never change (a reference, reward or judge model).
        weights_survive: what it releases comes back with its contents (CPU backup), so it may be
            verified without a push.
    """

    needs_offload: bool
    is_frozen: bool = False
    weights_survive: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.  ``only`` says which groups may take it; None means all."""

    phase: Phase
    command: Command
    target: Phase
    only: str | None = None


OFFLOADING = "groups that offload"
KEEPING = "groups that keep their GPUs"
SURVIVING = "groups whose weights survive a release"

_P, _C = Phase, Command
TABLE: tuple[Row, ...] = (
    Row(_P.SERVING, _C.PAUSE, _P.PAUSED),
    Row(_P.PAUSED, _C.FLUSH, _P.FLUSHED),
    Row(_P.PAUSED, _C.CONTINUE, _P.SERVING),
    Row(_P.FLUSHED, _C.RELEASE, _P.OFFLOADED, OFFLOADING),
    Row(_P.FLUSHED, _C.UPDATE_WEIGHTS, _P.WEIGHTS_UPDATED),
    Row(_P.FLUSHED, _C.CONTINUE, _P.SERVING),
    Row(_P.OFFLOADED, _C.RESUME_WEIGHTS, _P.WEIGHTS_ONLOADED, OFFLOADING),
    Row(_P.WEIGHTS_ONLOADED, _C.UPDATE_WEIGHTS, _P.WEIGHTS_UPDATED, OFFLOADING),
    Row(_P.WEIGHTS_ONLOADED, _C.VERIFY, _P.VERIFIED, SURVIVING),
    Row(_P.WEIGHTS_UPDATED, _C.UPDATE_WEIGHTS, _P.WEIGHTS_UPDATED),
    Row(_P.WEIGHTS_UPDATED, _C.VERIFY, _P.VERIFIED),
    Row(_P.VERIFIED, _C.RESUME_KV, _P.KV_ONLOADED, OFFLOADING),
    Row(_P.VERIFIED, _C.CONTINUE, _P.SERVING, KEEPING),
    Row(_P.KV_ONLOADED, _C.CONTINUE, _P.SERVING),
)

# The commands of the two transitions; between them lie resume_weights and update_weights.
OFFLOAD = (Command.PAUSE, Command.FLUSH, Command.RELEASE)
SERVE = (Command.VERIFY, Command.RESUME_KV, Command.CONTINUE)

# The phase each command ends in, so that a repeated command is recognised as one.
_ENDS_IN: dict[Command, Phase] = {row.command: row.target for row in TABLE}


def _applies(row: Row, traits: Traits) -> bool:
    if row.command is Command.UPDATE_WEIGHTS and traits.is_frozen:
        return False
    if row.only == OFFLOADING:
        return traits.needs_offload
    if row.only == KEEPING:
        return not traits.needs_offload
    if row.only == SURVIVING:
        return traits.weights_survive
    return True


def legal_commands(phase: Phase, traits: Traits) -> tuple[Command, ...]:
    """The commands that lead out of ``phase`` for a group with these traits."""
    return tuple(row.command for row in TABLE if row.phase is phase and _applies(row, traits))


def is_repeat(phase: Phase, command: Command) -> bool:
    """Whether ``command`` is the one that led into ``phase``, and so has nothing left to do.

    A second ``update_weights`` is never a repeat: it brings other weights.
    """
    return _ENDS_IN[command] is phase and command is not Command.UPDATE_WEIGHTS


def concerns(phase: Phase, command: Command, traits: Traits) -> bool:
    """Whether ``command`` is the way on for a group in ``phase``, so a transition includes it."""
    return command in legal_commands(phase, traits)


def before(
    command: Command, phases: Mapping[str, Phase], traits: Mapping[str, Traits]
) -> list[str]:
    """The groups of a server that have ``command`` before them in a transition."""
    return [name for name in phases if _is_before(command, phases[name], traits[name])]


# Groups in these have nothing to prove: they were only paused, or have proved it.
_PROVED = (Phase.SERVING, Phase.PAUSED, Phase.FLUSHED, Phase.VERIFIED, Phase.KV_ONLOADED)


def _is_before(command: Command, phase: Phase, traits: Traits) -> bool:
    if command is Command.VERIFY:
        return phase not in _PROVED
    if command is Command.CONTINUE:
        return phase is not Phase.SERVING
    if command is Command.RELEASE:
        # Who is offloaded is asked again, and does nothing: a resume that came late after its
        # caller had given up would be known there alone, or is out of date from now on.
        return traits.needs_offload and phase in (Phase.FLUSHED, Phase.OFFLOADED)
    return concerns(phase, command, traits)


def check_can_offload(phases: Mapping[str, Phase]) -> None:
    """Refuse an offload that would start in the middle of an onload.

    Raises:
        LifecycleError: naming the group that is elsewhere.
    """
    for name, phase in phases.items():
        if phase not in (Phase.SERVING, Phase.PAUSED, Phase.FLUSHED, Phase.OFFLOADED):
            raise LifecycleError(
                f"cannot offload: group {name} is {phase}, in the middle of an onload; "
                "finish that first",
                command="offload",
                phase=phase,
            )


def next_phase(phase: Phase, command: Command, traits: Traits) -> Phase:
    """Where ``command`` leads from ``phase``.

    Raises:
        LifecycleError: the command is not legal there; the message says what is.
    """
    for row in TABLE:
        if row.phase is phase and row.command is command and _applies(row, traits):
            return row.target
    legal = legal_commands(phase, traits)
    raise LifecycleError(
        f"cannot {command} while {phase}; legal now: {', '.join(legal)}",
        command=command,
        phase=phase,
        legal=legal,
    )


def server_phase(phases: Iterable[Phase]) -> Phase | None:
    """The phase of a whole server: that of its groups if they agree, else None."""
    distinct = set(phases)
    return distinct.pop() if len(distinct) == 1 else None


def diagram() -> str:
    """The table as a Mermaid state diagram, for the README."""
    lines = ["stateDiagram-v2", "    [*] --> serving"]
    for row in TABLE:
        note = f" ({row.only})" if row.only else ""
        lines.append(f"    {row.phase} --> {row.target}: {row.command}{note}")
    return "\n".join(lines)
