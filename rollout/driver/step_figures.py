"""The figures of a step, on their way to the caller and to the server's page.

Always true: an error of ``on_metrics`` is logged, and ends no call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from engines.process.background import Then, keep_task
from rollout.driver.client.generation_client import GenerationClient
from rollout.driver.stream.user_code import CallEnded, user_code

logger = logging.getLogger(__name__)

OnMetrics = Callable[[int, Mapping[str, float]], None]


class StepFigures:
    """Gives each step's metrics to ``on_metrics`` and sends them to the server's page."""

    def __init__(self, client: GenerationClient, on_metrics: OnMetrics | None) -> None:
        self._client = client
        self._on_metrics = on_metrics
        self._reports: set[asyncio.Task[None]] = set()

    def publish(self, step: int, metrics: Mapping[str, float], **more: Any) -> None:
        """Give them on, without waiting for the page; ``more`` is shown there.

        Raises:
            CallEnded: ``on_metrics`` raised ``SystemExit`` or ``KeyboardInterrupt``.
        """
        figures = {"step": step, "metrics": dict(metrics), **more}
        task = keep_task(partial(self._client.report, figures), "driver-report", Then.IS_OVER)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)
        if self._on_metrics is None:
            return
        try:
            with user_code("on_metrics"):
                self._on_metrics(step, metrics)
        except CallEnded:
            raise
        except Exception:
            logger.exception("on_metrics failed; the metrics of step %d are lost there", step)

    async def close(self) -> None:
        """Wait for the reports under way; each has its own deadline."""
        if self._reports:
            await asyncio.wait(self._reports)
