"""The figures of each step into TensorBoard, wandb, JSON lines, or all of them.

Each is a callable for ``on_metrics``.  What writes is given, or made with an optional library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.driver.driver import OnMetrics
from rollout.errors import ConfigError
from rollout.extras import extra


def tensorboard(writer: Any) -> OnMetrics:
    """Into a ``SummaryWriter`` of torch or tensorboardX, or a new one of the latter.

    Args:
        writer: it, or the directory for a new one.

    Raises:
        ConfigError: tensorboardX is needed and not installed.
    """
    if isinstance(writer, str | Path):
        with extra("tracking", "tensorboardX is not installed"):
            from tensorboardX import SummaryWriter
        writer = SummaryWriter(str(writer))

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return write


def wandb(run: Any = None) -> OnMetrics:
    """Into a wandb run, or the one that ``wandb.init`` has begun.

    Raises:
        ConfigError: wandb is needed and not installed, or has not been begun.
    """
    if run is None:
        with extra("tracking", "wandb is not installed"):
            import wandb as library
        run = library.run
        if run is None:
            raise ConfigError("wandb has no run: call wandb.init first, or pass the run")

    def write(step: int, metrics: Mapping[str, float]) -> None:
        # Not as wandb's own step, which must not go back: rollouts and evaluations share numbers.
        run.log({**metrics, "rollout/step": step})

    return write


def json_lines(path: Path | str) -> OnMetrics:
    """One JSON object a step, appended to a file."""

    def write(step: int, metrics: Mapping[str, float]) -> None:
        with Path(path).open("a") as lines:
            lines.write(json.dumps({"step": step, **metrics}) + "\n")

    return write


def every(*trackers: OnMetrics) -> OnMetrics:
    """Into each of these."""

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for tracker in trackers:
            tracker(step, metrics)

    return write
