"""Doubles of the trackers' packages, with the signatures of those parts that the adapters call.

``tests/rollout/driver/figures/test_trackers.py`` runs the same test over the packages themselves,
where they are installed.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any


class Table:
    """A table of wandb or trackio."""

    def __init__(self, columns: list[str] | None = None, data: Sequence[Any] | None = None) -> None:
        self.columns, self.data = columns, data


class WandbRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.metrics: dict[str, str | None] = {}
        self.is_finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.logged.append(data)

    def finish(self, exit_code: int | None = None) -> None:
        self.is_finished = True


class Wandb:
    """``wandb``: one run of a process."""

    Table = Table

    def __init__(self) -> None:
        self.run: WandbRun | None = None
        self.projects: list[str | None] = []

    def init(self, *, project: str | None = None, mode: str | None = None) -> WandbRun:
        self.projects.append(project)
        self.run = WandbRun()
        return self.run


class Mlflow:
    """``mlflow``: a thread's active run, and a client that logs to each by its id."""

    def __init__(self) -> None:
        self._active = threading.local()
        self.metrics: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.tables: dict[str, dict[str, Any]] = {}
        self.ended: list[str] = []
        self.experiment = ""

    def set_tracking_uri(self, uri: str) -> None:
        self.uri = uri

    def set_experiment(self, experiment_name: str) -> None:
        self.experiment = experiment_name

    def active_run(self) -> Any:
        return getattr(self._active, "run", None)

    def start_run(self, run_id: str | None = None, run_name: str | None = None) -> Any:
        run_id = run_id or f"run-{len(self.metrics)}"
        self.metrics[run_id] = []
        self._active.run = SimpleNamespace(info=SimpleNamespace(run_id=run_id))
        return self._active.run

    def log_metrics(
        self, metrics: dict[str, float], step: int | None = None, *, run_id: str | None = None
    ) -> None:
        assert run_id is not None
        assert step is not None
        self.metrics[run_id].append((step, metrics))

    def MlflowClient(self) -> Any:
        def log_table(run_id: str, data: dict[str, Any], artifact_file: str) -> None:
            self.tables[artifact_file] = data

        return SimpleNamespace(log_table=log_table, set_terminated=self.ended.append)


class TrackioRun:
    def __init__(self, project: str) -> None:
        self.project = project
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
        self.is_finished = False

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.is_finished = True


class Trackio:
    """``trackio``: the current run of a context."""

    Table = Table

    def __init__(self) -> None:
        current: contextvars.ContextVar[TrackioRun | None]
        current = contextvars.ContextVar("current_run", default=None)
        self.context_vars = SimpleNamespace(current_run=current)
        self.runs: list[TrackioRun] = []

    def init(self, project: str, name: str | None = None) -> TrackioRun:
        run = TrackioRun(project)
        self.runs.append(run)
        self.context_vars.current_run.set(run)
        return run


class Mine:
    """A tracker of the user."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.figures: list[tuple[int, Mapping[str, float]]] = []
        self.samples: list[tuple[int, Sequence[Mapping[str, Any]]]] = []
        self.is_closed = False

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.figures.append((step, figures))

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        self.samples.append((step, samples))

    def close(self) -> None:
        self.is_closed = True
