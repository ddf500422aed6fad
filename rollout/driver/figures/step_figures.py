"""The figures of a step, on their way to the caller, to trackers and to the server's page.

Always true: no error of ``on_metrics`` or a tracker ends a call, and its time delays none; each is
called for one step after the other, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from engines.process.background import Then, keep_task
from rollout.driver.client.generation_client import GenerationClient
from rollout.driver.figures.outlet import Outlet, StepItem
from rollout.driver.figures.trackers import Tracker, outlet_of
from rollout.driver.user_code import result_now, result_of

logger = logging.getLogger(__name__)

OnMetrics = Callable[[int, Mapping[str, float]], object]

_REPORT_S = 10.0
_CLOSE_S = 2.0


class StepFigures:
    """Gives the metrics of steps to ``on_metrics`` and trackers, and sends them to the page.

    Args:
        trackers: as ``open_trackers`` returns them; closed with this.
    """

    def __init__(
        self,
        client: GenerationClient,
        on_metrics: OnMetrics | None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._client = client
        self._driver = secrets.token_hex(8)
        self._reports: set[asyncio.Task[None]] = set()
        self._outlets = [outlet_of(tracker) for tracker in trackers]
        if on_metrics is not None:
            give = partial(_call, on_metrics)
            outlet = Outlet("on_metrics", give, close_s=_CLOSE_S, logs_each=True)
            self._outlets.append(outlet)

    def publish(
        self,
        step: int,
        metrics: Mapping[str, float],
        samples: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> None:
        """Give them on, without waiting; ``more`` is shown on the page.  Raises nothing."""
        figures = {"driver": self._driver, "step": step, "metrics": dict(metrics), **more}
        if samples is not None:
            figures["samples"] = samples
        task = keep_task(partial(self._report, figures), "driver-report", Then.IS_OVER)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)
        for outlet in self._outlets:
            outlet.put(StepItem(step, dict(metrics), samples or ()))

    async def _report(self, figures: Mapping[str, Any]) -> None:
        try:
            what = "the generation client's report"
            await result_of(what, self._client.report, figures, limit_s=_REPORT_S)
        except Exception:
            logger.exception("the page has no figures of step %s", figures["step"])

    async def close(self) -> None:
        """Wait for reports and calls under way, but no longer than a few seconds."""
        await asyncio.gather(self._end_reports(), *(outlet.close() for outlet in self._outlets))

    async def _end_reports(self) -> None:
        if self._reports:
            _, late = await asyncio.wait(self._reports, timeout=_CLOSE_S)
            for task in late:
                task.cancel()


def _call(on_metrics: OnMetrics, item: StepItem) -> None:
    result_now("on_metrics", on_metrics, item.step, dict(item.metrics))
