"""The figures of a step, on their way to the caller and to the server's page.

Always true: neither an error of ``on_metrics`` nor its time ends or delays a call; it is called for
one step after the other, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from queue import Queue
from typing import Any

from engines.process.background import Then, in_own_thread, keep_task
from rollout.driver.client.generation_client import GenerationClient
from rollout.driver.user_code import raised_by, result_now, result_of

logger = logging.getLogger(__name__)

OnMetrics = Callable[[int, Mapping[str, float]], None]

_MOST_WAITING = 256
_REPORT_S = 10.0
_CLOSE_S = 2.0


class StepFigures:
    """Gives each step's metrics to ``on_metrics`` and sends them to the server's page."""

    def __init__(self, client: GenerationClient, on_metrics: OnMetrics | None) -> None:
        self._client = client
        self._on_metrics = on_metrics
        self._driver = secrets.token_hex(8)
        self._reports: set[asyncio.Task[None]] = set()
        # Steps with their metrics; None is the end.
        self._calls: Queue[tuple[int, dict[str, float]] | None] = Queue()
        self._calling: Future[None] | None = None

    def publish(self, step: int, metrics: Mapping[str, float], **more: Any) -> None:
        """Give them on, without waiting; ``more`` is shown on the page.  Raises nothing."""
        figures = {"driver": self._driver, "step": step, "metrics": dict(metrics), **more}
        task = keep_task(partial(self._report, figures), "driver-report", Then.IS_OVER)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)
        if self._on_metrics is None:
            return
        if self._calls.qsize() >= _MOST_WAITING:
            logger.error(
                "on_metrics is %d steps late; the metrics of step %d are lost there",
                _MOST_WAITING,
                step,
            )
            return
        self._calls.put((step, dict(metrics)))
        if self._calling is None:
            self._calling = in_own_thread(self._call, "driver-metrics")

    async def _report(self, figures: Mapping[str, Any]) -> None:
        try:
            what = "the generation client's report"
            await result_of(what, self._client.report, figures, limit_s=_REPORT_S)
        except Exception:
            logger.exception("the page has no figures of step %s", figures["step"])

    def _call(self) -> None:
        assert self._on_metrics is not None
        while (call := self._calls.get()) is not None:
            try:
                result_now("on_metrics", self._on_metrics, *call)
            except Exception as error:
                why = raised_by("on_metrics", error)
                logger.exception("%s; the metrics of step %d are lost there", why, call[0])

    async def close(self) -> None:
        """Wait for reports and calls under way, but no longer than two seconds."""
        await asyncio.gather(self._end_reports(), self._end_calls())

    async def _end_reports(self) -> None:
        if self._reports:
            _, late = await asyncio.wait(self._reports, timeout=_CLOSE_S)
            for task in late:
                task.cancel()

    async def _end_calls(self) -> None:
        calling = self._calling
        if calling is None:
            return
        self._calls.put(None)
        # In a thread, because the calls are in one, too, whatever the clock of this loop is.
        waiting = in_own_thread(lambda: wait([calling], _CLOSE_S), "driver-metrics-end")
        await asyncio.wrap_future(waiting)
        if not calling.done():
            logger.error(
                "on_metrics still runs as the driver is closed; it may not get the metrics of the "
                "last %d steps",
                self._calls.qsize() - 1,
            )
