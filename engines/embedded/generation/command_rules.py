"""Rules for which command is legal when: plain functions over one value.

SGLang dies or hangs where these functions refuse.

Always true: a refused command has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.embedded.core.errors import Conflict
from engines.protocol import MemoryTag, PauseMode

_NEEDED_TO_GENERATE = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)


@dataclass(frozen=True, slots=True)
class Situation:
    """All facts that decide whether a command is legal.

    Attributes:
        is_saver_enabled: started with ``--enable-memory-saver``.
        paused: the mode of the pause, or None while serving.
        num_in_flight: requests admitted and not answered; those held at the gate do not count.
        released: tags whose memory is given back.
    """

    is_saver_enabled: bool = True
    paused: PauseMode | None = None
    num_in_flight: int = 0
    released: frozenset[MemoryTag] = frozenset()

    @property
    def num_holding_kv(self) -> int:
        """Requests whose KV is, or soon will be, in the cache: a retract took it from them."""
        return 0 if self.paused is PauseMode.RETRACT else self.num_in_flight


def require_can_pause(now: Situation, mode: PauseMode) -> None:
    if mode is PauseMode.ABORT and now.paused is PauseMode.IN_PLACE and now.num_in_flight:
        raise Conflict(
            f"cannot pause with mode abort: already paused in_place with {now.num_in_flight} "
            "requests frozen (SGLang deadlocks here); continue_generation first"
        )


def require_can_continue(now: Situation) -> None:
    _require_resident(now, "continue_generation", _NEEDED_TO_GENERATE)


def require_can_admit(now: Situation) -> None:
    _require_resident(now, "generate", _NEEDED_TO_GENERATE)


def require_weights(now: Situation, command: str) -> None:
    _require_resident(now, command, (MemoryTag.WEIGHTS,))


def require_can_flush_after_update(now: Situation, command: str) -> None:
    if now.num_holding_kv:
        raise Conflict(
            f"{command} with flush_cache needs an idle KV cache, {now.num_holding_kv} requests "
            "are in flight; send flush_cache false, or pause with mode abort or retract"
        )


def require_can_release(now: Situation, tags: Sequence[MemoryTag]) -> None:
    _require_saver(now, "release_memory_occupation")
    if twice := [tag.value for tag in tags if tag in now.released]:
        raise Conflict(f"cannot release {', '.join(twice)}: released already")
    if now.num_holding_kv:
        raise Conflict(
            f"cannot release memory: {now.num_holding_kv} requests are in flight "
            f"({_describe(now)}); pause_generation with mode abort or retract first"
        )


def require_can_resume(now: Situation, tags: Sequence[MemoryTag]) -> None:
    _require_saver(now, "resume_memory_occupation")
    if resident := [tag.value for tag in tags if tag not in now.released]:
        raise Conflict(f"cannot resume {', '.join(resident)}: not released")


def _require_saver(now: Situation, command: str) -> None:
    if not now.is_saver_enabled:
        raise Conflict(f"{command} would free nothing: start with --enable-memory-saver")


def _require_resident(now: Situation, command: str, tags: Sequence[MemoryTag]) -> None:
    if missing := [tag.value for tag in tags if tag in now.released]:
        raise Conflict(f"cannot {command}: {', '.join(missing)} released; resume first")


def _describe(now: Situation) -> str:
    return "not paused" if now.paused is None else f"paused {now.paused.value}"
