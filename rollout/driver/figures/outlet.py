"""A receiver of step figures in a thread of its own: a callback of the user, or a tracker.

Always true: neither its errors nor its time end or delay a call; it gets one step after the other;
a bounded number of them waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import Queue
from typing import Any

from engines.process.background import in_own_thread
from rollout.driver.user_code import raised_by, result_now

logger = logging.getLogger(__name__)

_MOST_WAITING = 256


@dataclass(frozen=True, slots=True)
class StepItem:
    """What is published of a step.

    Attributes:
        samples: as ``shown_samples`` makes them.
    """

    step: int
    metrics: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]] = ()


class Outlet:
    """Gives each step to one receiver.

    Args:
        name: of the receiver, in logs.
        give: gives one step to the user's code, with ``result_now``; called in the thread.
        end: of the user's code; called there after the last step, or None for nothing.
        close_s: seconds that a close waits for what is under way.
        logs_each: every error is logged; else the first one, and at the end the number of others.
    """

    def __init__(
        self,
        name: str,
        give: Callable[[StepItem], None],
        end: Callable[[], object] | None = None,
        *,
        close_s: float,
        logs_each: bool,
    ) -> None:
        self._name = name
        self._give = give
        self._end = end
        self._close_s = close_s
        self._logs_each = logs_each
        self._num_errors = 0
        # None is the end.
        self._items: Queue[StepItem | None] = Queue()
        self._calling: Future[None] | None = None

    def put(self, item: StepItem) -> None:
        """Give it on, without waiting."""
        if self._items.qsize() >= _MOST_WAITING:
            self._note(f"{self._name} is {_MOST_WAITING} steps late", None, item.step)
            return
        self._items.put(item)
        self._start()

    def _start(self) -> None:
        if self._calling is None:
            self._calling = in_own_thread(self._call, "driver-metrics")

    def _call(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self._give(item)
            except Exception as error:  # of the user's code, as ``result_now`` gives it
                self._note(raised_by(self._name, error), error, item.step)
        if self._num_errors > 1 and not self._logs_each:
            logger.error("%s: the figures of %d steps are lost there", self._name, self._num_errors)
        if self._end is not None:
            try:
                result_now(self._name, self._end)
            except Exception as error:  # as above
                logger.error("%s, as it was closed", raised_by(self._name, error), exc_info=error)

    def _note(self, why: str, error: Exception | None, step: int) -> None:
        self._num_errors += 1
        if self._logs_each or self._num_errors == 1:
            logger.error("%s; the metrics of step %d are lost there", why, step, exc_info=error)

    async def close(self) -> None:
        """Wait for what is under way, but no longer than ``close_s``; then it is left behind."""
        if self._calling is None and self._end is None:
            return
        self._items.put(None)
        self._start()
        calling = self._calling
        assert calling is not None
        # In a thread, because the calls are in one, too, whatever the clock of this loop is.
        waiting = in_own_thread(lambda: wait([calling], self._close_s), "driver-metrics-end")
        await asyncio.wrap_future(waiting)
        if not calling.done():
            logger.error(
                "%s still runs as the driver is closed; it may not get the metrics of the last %d "
                "steps",
                self._name,
                max(0, self._items.qsize() - 1),
            )
