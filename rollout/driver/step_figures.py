"""The figures of a step, on their way to the caller and to the server's page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rollout.driver.client.generation_client import GenerationClient

OnMetrics = Callable[[int, Mapping[str, float]], None]


class StepFigures:
    """Gives each step's metrics to ``on_metrics`` and sends them to the server's page."""

    def __init__(self, client: GenerationClient, on_metrics: OnMetrics | None) -> None:
        self._client = client
        self._on_metrics = on_metrics
        self._reports: set[asyncio.Task[None]] = set()

    def publish(self, step: int, metrics: Mapping[str, float], **more: Any) -> None:
        """Give them on, without waiting for the page; ``more`` is shown there."""
        figures = {"step": step, "metrics": dict(metrics), **more}
        task = asyncio.create_task(self._client.report(figures), name="driver-report")
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)
        if self._on_metrics is not None:
            self._on_metrics(step, metrics)

    async def close(self) -> None:
        """Wait for the reports under way; each has its own deadline."""
        if self._reports:
            await asyncio.wait(self._reports)
