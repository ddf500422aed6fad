"""What became of a release or resume whose answer was lost: looked at, and not guessed.

Always true: it is decided by what the engine says is released, else by what has been measured to
come free, after it has answered a question that came behind the lost call; what that leaves open
stays uncertain, and whoever is uncertain is ended by its group.  A call is made again only if the
engine itself says that it was not done.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from enum import StrEnum

from engines.errors import EngineError, EngineRejected, EngineUnreachable
from engines.protocol import MemoryTag
from rollout.member import Member
from rollout.timeline.recorder import happened

logger = logging.getLogger(__name__)

_SERVER_ERROR = 500


class Fate(StrEnum):
    """What became of a call."""

    DONE = "done"
    NOT_DONE = "not done"
    UNCERTAIN = "uncertain"


def is_lost(error: EngineError) -> bool:
    """Whether a call may have been carried out although it failed."""
    if isinstance(error, EngineUnreachable):
        return error.maybe_executed
    return isinstance(error, EngineRejected) and error.status >= _SERVER_ERROR


def fate_of_release(
    tags: Sequence[MemoryTag],
    released: Collection[str] | None,
    freed_bytes: int | None,
    least_bytes: int,
) -> Fate:
    """What became of a release of ``tags``.

    Args:
        released: by the engine's own word; None where it does not tell.
        freed_bytes: as measured from outside; None where it was not.
        least_bytes: what must come free, 0 where nothing can be said.
    """
    if released is not None:
        return _by_its_word([tag in released for tag in tags])
    if least_bytes and freed_bytes is not None and freed_bytes >= least_bytes:
        return Fate.DONE
    return Fate.UNCERTAIN  # nothing came free yet: it may still do so


def fate_of_resume(tags: Sequence[MemoryTag], released: Collection[str] | None) -> Fate:
    """What became of a resume of ``tags``, by the engine's own word alone: memory that was taken
    back shows from outside only when it is used."""
    if released is None:
        return Fate.UNCERTAIN
    return _by_its_word([tag not in released for tag in tags])


def _by_its_word(done: Sequence[bool]) -> Fate:
    if all(done):
        return Fate.DONE
    return Fate.UNCERTAIN if any(done) else Fate.NOT_DONE


async def look(member: Member, error: EngineError) -> Collection[str] | None:
    """What it says is released, behind the call that was lost.

    Raises:
        EngineError: ``error``, if it does not answer.
    """
    try:
        # SGLang answers this from its schedulers, one call after the other.
        return (await member.engine.server_info()).released
    except EngineError as silent:
        raise error from silent


async def carry_out(
    member: Member,
    operation: str,
    call: Callable[[], Awaitable[None]],
    fate_of: Callable[[Collection[str] | None], Awaitable[Fate]],
) -> None:
    """``call``, and if its answer is lost, what is left to do of it.

    Args:
        fate_of: what became of it, by what the engine says is released.

    Raises:
        EngineError: of the call, unless what became of it is certain.
    """
    try:
        await call()
    except EngineError as error:
        if not is_lost(error):
            raise
        fate = await fate_of(await look(member, error))
        if fate is Fate.UNCERTAIN:
            raise
        said = f"{operation} was lost and is {fate}: {error}"
        happened("settled", said, engine_id=member.engine_id)
        logger.warning("engine %s: %s", member.engine_id, said)
        if fate is Fate.NOT_DONE:
            await call()
