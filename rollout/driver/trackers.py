"""Metrics of each step to TensorBoard, wandb or JSON lines.

Each function returns a callable for ``on_metrics``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.core.arguments import check_path, wrong
from rollout.core.errors import ConfigError
from rollout.core.optional_deps import optional_import
from rollout.driver.driver import OnMetrics


def tensorboard(writer: Any) -> OnMetrics:
    """Write to TensorBoard.

    Args:
        writer: a ``SummaryWriter`` of torch or tensorboardX, or a directory for a new one of the
            latter.

    Raises:
        ConfigError: tensorboardX is needed and not installed, or it is no writer.
    """
    if isinstance(writer, str | Path):
        with optional_import("tracking", "tensorboardX is not installed"):
            from tensorboardX import SummaryWriter
        writer = SummaryWriter(str(writer))
    if not hasattr(writer, "add_scalar"):
        raise wrong("writer", writer, "a SummaryWriter, or a folder for a new one")

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return write


def wandb(run: Any = None) -> OnMetrics:
    """Write to a wandb run.

    Args:
        run: None for the run of ``wandb.init``.

    Raises:
        ConfigError: wandb is needed and not installed, ``wandb.init`` was not called, or it is no
            run.
    """
    if run is None:
        with optional_import("tracking", "wandb is not installed"):
            import wandb as library
        run = library.run
        if run is None:
            raise ConfigError("wandb has no run: call wandb.init first, or pass the run")
    if not hasattr(run, "log"):
        raise wrong("run", run, "a wandb run, or None for that of wandb.init")

    def write(step: int, metrics: Mapping[str, float]) -> None:
        # Not as wandb's step, which must only rise: rollouts and evaluations have the same numbers.
        run.log({**metrics, "rollout/step": step})

    return write


def json_lines(path: Path | str) -> OnMetrics:
    """Append one JSON object per step to a file.

    Args:
        path: of the file, in a folder that exists.

    Raises:
        ConfigError: there is no such folder, or it is no path.
    """
    check_path("path", path)
    if not Path(path).parent.is_dir():
        raise wrong("path", str(path), "in a folder that exists")

    def write(step: int, metrics: Mapping[str, float]) -> None:
        with Path(path).open("a") as lines:
            lines.write(json.dumps({"step": step, **metrics}) + "\n")

    return write


def every(*trackers: OnMetrics) -> OnMetrics:
    """Write to each of these trackers.

    Args:
        trackers: callables for ``on_metrics``.

    Raises:
        ConfigError: one is no function.
    """
    for index, tracker in enumerate(trackers):
        if not callable(tracker):
            raise wrong(f"trackers[{index}]", tracker, "a function")

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for tracker in trackers:
            tracker(step, metrics)

    return write
