"""How many of the tokens that an engine's draft proposes are right, and whether that has fallen.

Always true:
- a window lasts from one moment when the engine continues to the next: what a push or an offload
  has changed shows in the one after it;
- a window with too few drafted tokens to know a share is continued by the next one;
- what cannot be read, or comes late, changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from engines.protocol import Engine, Loads
from engines.protocol.plain_text import describe
from rollout.core.types import DraftFigures
from rollout.rules.diagnosis import DRAFT_ADVICE

logger = logging.getLogger(__name__)

FEWEST_DRAFTED = 200
"""Drafted tokens from which on their share is known to 0.1, with a probability of 0.995."""
LEAST_KEPT = 0.5
"""Part of the highest share so far; a share below it is a finding."""
_READ_S = 2.0
# SGLang's default; in each step a request drafts a token or more.
_STEPS_OF_INTERVAL = 40


def has_fallen(highest: float | None, share: float | None) -> bool:
    """Whether less than half is left of the highest share; an unknown one has not fallen."""
    return highest is not None and share is not None and share < LEAST_KEPT * highest


class DraftRecord:
    """The drafted tokens of one engine.

    Args:
        draft: as in ``Features``.
        version: of its weights now.

    Attributes:
        last: the window that has ended last, or None before the first.
    """

    def __init__(self, draft: str, version: int | None = None) -> None:
        self.last: DraftFigures | None = None
        self._draft = draft
        self._version = version
        self._drafted = self._accepted = 0.0
        self._highest: float | None = None
        self._highest_version: int | None = None
        # What it had counted, or the interval that it had measured, when it was read last.
        self._counted: tuple[int, int] | None = None
        self._interval: str | None = None

    def note(self, loads: Loads) -> None:
        """Take what the engine reports."""
        if loads.num_drafted is not None:
            self._note_counts(loads.num_drafted, loads.num_accepted)
        elif loads.accepted_share is not None:
            self._note_interval(loads.accepted_share, loads.interval)

    def _note_counts(self, drafted: int, accepted: int) -> None:
        # One that was launched by others has counted before.
        before_drafted, before_accepted = self._counted or (drafted, accepted)
        # Fewer than before: this was read earlier, and comes late.
        if drafted >= before_drafted and accepted >= before_accepted:
            self._counted = drafted, accepted
            self._drafted += drafted - before_drafted
            self._accepted += accepted - before_accepted

    def _note_interval(self, share: float, interval: str) -> None:
        before, self._interval = self._interval, interval
        # The first one may have begun before the window.
        if before is not None and interval != before:
            self._drafted += _STEPS_OF_INTERVAL
            self._accepted += _STEPS_OF_INTERVAL * share

    def begin(self, version: int | None) -> None:
        """Begin a window: the engine is about to continue with weights of this version."""
        self.last, self._interval = self.figures(), None
        if (share := self._share()) is None:
            return
        if self._highest is None or share > self._highest:
            self._highest, self._highest_version = share, self._version
        self._drafted = self._accepted = 0.0
        self._version = version

    def _share(self) -> float | None:
        return self._accepted / self._drafted if self._drafted >= FEWEST_DRAFTED else None

    def figures(self) -> DraftFigures:
        """What is known of the window that runs."""
        share = self._share()
        return DraftFigures(
            draft=self._draft,
            share=share,
            num_drafted=round(self._drafted),
            weight_version=self._version,
            highest_share=self._highest,
            highest_version=self._highest_version,
            fall=self._fall_text() if has_fallen(self._highest, share) else "",
        )

    def _fall_text(self) -> str:
        return (
            f"of the tokens that its draft {self._draft} proposes, {self._share():.1%} are right "
            f"since weight version {self._version}, and {self._highest:.1%} were at version "
            f"{self._highest_version}"
        )


class Drafting(Protocol):
    """The part of an ``EngineState`` that is read here."""

    @property
    def engine_id(self) -> str: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def drafts(self) -> DraftRecord | None: ...


async def read_drafts(members: Iterable[Drafting]) -> None:
    """Read how many drafted tokens were right, of all engines with a draft at the same time."""
    reads = [_read(each.engine_id, each.engine, each.drafts) for each in members if each.drafts]
    if reads:
        await asyncio.gather(*reads)


async def _read(engine_id: str, engine: Engine, record: DraftRecord) -> None:
    had_fallen = bool(record.figures().fall)
    try:
        async with asyncio.timeout(_READ_S):
            loads = await engine.loads()
    except Exception as error:  # the probes decide whether it is dead
        logger.debug("engine %s: its drafts were not read: %s", engine_id, describe(error))
        return
    record.note(loads)
    if (fall := record.figures().fall) and not had_fallen:
        logger.warning("engine %s: %s. %s", engine_id, fall, "; ".join(DRAFT_ADVICE))
