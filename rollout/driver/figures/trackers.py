"""Trackers of experiments: an adapter for each, which gets the figures of steps and their samples.

    trackers="tensorboard"
    trackers=["mlflow", {"wandb": {"project": "grpo"}}, mine]   # mine.log(figures, step)

Always true: a run that the program has open is used, and stays open; a run that was opened here is
ended by ``close``.  The packages are imported only for trackers that are named.
"""

from __future__ import annotations

import contextvars
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol

from engines.process.background import in_own_thread
from rollout.core.arguments import wrong, wrong_type
from rollout.core.errors import ConfigError
from rollout.driver.figures.keys import SAMPLES, STEP, families
from rollout.driver.figures.outlet import Outlet, StepItem
from rollout.driver.user_code import result_now

_CLOSE_S = 3.0
_COLUMNS = ("prompt", "reply", "reward", "tokens", "engines", "versions", "status")


class Tracker(Protocol):
    """Where figures go.  ``log_samples(samples, step)`` and ``close()`` are called if it has them.

    All are called in a thread of the driver's, one after the other.
    """

    def log(self, figures: Mapping[str, float], step: int) -> object:
        """Take the figures of a step, or of an evaluation or check with the step's number."""


Trackers = (
    str
    | Tracker
    | Mapping[str, Mapping[str, Any]]
    | Sequence[str | Tracker | Mapping[str, Mapping[str, Any]]]
)
"""Names, names with arguments, and objects."""


class WandbTracker:
    """Weights & Biases; the arguments are those of ``wandb.init``."""

    def __init__(self, **arguments: Any) -> None:
        wandb = _library("wandb")
        self._make_table = wandb.Table
        self._is_shared = wandb.run is not None
        self._run: Any = wandb.run or wandb.init(**arguments)
        # A step of their own: wandb's must only rise, and evaluations have the numbers of steps.
        self._run.define_metric(STEP)
        for family in families():
            self._run.define_metric(f"{family}/*", step_metric=STEP)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({**figures, STEP: step})

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        table = self._make_table(columns=list(_COLUMNS), data=_rows(samples))
        self._run.log({SAMPLES: table, STEP: step})

    def close(self) -> None:
        if not self._is_shared:
            self._run.finish()


class TensorboardTracker:
    """Files for TensorBoard; the arguments are those of ``tensorboardX.SummaryWriter``."""

    def __init__(self, **arguments: Any) -> None:
        self._writer = _library("tensorboardX").SummaryWriter(**arguments)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        rows = [_COLUMNS, ["---"] * len(_COLUMNS), *_rows(samples)]
        self._writer.add_text(SAMPLES, "\n".join(map(_markdown_row, rows)), step)

    def close(self) -> None:
        self._writer.close()


class MlflowTracker:
    """MLflow; the arguments are those of ``mlflow.start_run``.

    Args:
        tracking_uri: for ``mlflow.set_tracking_uri``.
        experiment_name: for ``mlflow.set_experiment``.
    """

    # What MLflow does not accept in the name of a metric.
    _NOT_IN_NAMES = re.compile(r"[^\w/ .:-]")

    def __init__(
        self, *, tracking_uri: str = "", experiment_name: str = "", **arguments: Any
    ) -> None:
        mlflow = _library("mlflow")
        if tracking_uri:
            mlflow.set_tracking_uri(tracking_uri)
        run = mlflow.active_run()
        self._is_shared = run is not None
        if run is None:
            if experiment_name:
                mlflow.set_experiment(experiment_name)
            # The active run is a thread's, and that of this one stays free for the program.
            run = in_own_thread(lambda: mlflow.start_run(**arguments), "mlflow-start").result()
        self._run_id = run.info.run_id
        self._client = mlflow.MlflowClient()
        self._log_metrics = mlflow.log_metrics

    def log(self, figures: Mapping[str, float], step: int) -> None:
        named = {self._NOT_IN_NAMES.sub("_", name): value for name, value in figures.items()}
        self._log_metrics(named, step=step, run_id=self._run_id)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        columns = dict(zip(_COLUMNS, map(list, zip(*_rows(samples), strict=True)), strict=True))
        # A file for each step: to append to one, MLflow reads it first.
        self._client.log_table(self._run_id, columns, f"{SAMPLES}/{step:08}.json")

    def close(self) -> None:
        if not self._is_shared:
            self._client.set_terminated(self._run_id)


class TrackioTracker:
    """Trackio; the arguments are those of ``trackio.init``; the default project is ``rollout``."""

    def __init__(self, **arguments: Any) -> None:
        trackio = _library("trackio")
        self._make_table = trackio.Table
        run = trackio.context_vars.current_run.get()
        self._is_shared = run is not None
        if run is None:
            # The current run is a context's, and that of this one stays free for the program.
            context = contextvars.copy_context()
            run = context.run(trackio.init, **{"project": "rollout", **arguments})
        self._run: Any = run

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        table = self._make_table(columns=list(_COLUMNS), data=_rows(samples))
        self._run.log({SAMPLES: table}, step=step)

    def close(self) -> None:
        if not self._is_shared:
            self._run.finish()


def _library(name: str) -> Any:
    """An optional package, most of which have no types."""
    return import_module(name)


# By name: the adapter, and the package as pip knows it.
ADAPTERS: Mapping[str, tuple[Callable[..., Tracker], str]] = {
    "wandb": (WandbTracker, "wandb"),
    "tensorboard": (TensorboardTracker, "tensorboardX"),
    "mlflow": (MlflowTracker, "mlflow"),
    "trackio": (TrackioTracker, "trackio"),
}


def open_trackers(trackers: Trackers) -> list[Tracker]:
    """Open these trackers; those that are open, as returned by this, stay as they are.

    Raises:
        TypeError, ValueError: an entry is no tracker, or a name is unknown.
        ConfigError: a package is not installed, or a tracker does not open.
            Nothing stays open.
    """
    opened: list[Tracker] = []
    try:
        for tracker, arguments in _each(trackers):
            opened.append(tracker if not isinstance(tracker, str) else _open(tracker, arguments))
    except BaseException:
        close_trackers(opened)
        raise
    return opened


def close_trackers(trackers: Sequence[Tracker]) -> None:
    """Close trackers that nothing was given to, while another error is raised."""
    for tracker in trackers:
        if (close := getattr(tracker, "close", None)) is not None:
            with suppress(Exception):  # it must not hide the error
                in_own_thread(close, "tracker-close").result(_CLOSE_S)


def outlet_of(tracker: Tracker) -> Outlet:
    """The outlet that gives steps to a tracker."""
    log_samples = getattr(tracker, "log_samples", None)
    named = next((name for name, row in ADAPTERS.items() if type(tracker) is row[0]), "")
    name = f"tracker {named or type(tracker).__name__}"

    def give(item: StepItem) -> None:
        result_now(name, tracker.log, item.metrics, item.step)
        if item.samples and log_samples is not None:
            result_now(name, log_samples, item.samples, item.step)

    return Outlet(
        name,
        give,
        getattr(tracker, "close", None),
        close_s=_CLOSE_S,
        logs_each=False,
    )


def _each(trackers: Any) -> Iterator[tuple[str | Tracker, Mapping[str, Any]]]:
    """Each tracker with its arguments."""
    single = isinstance(trackers, str | Mapping) or hasattr(trackers, "log")
    for entry in [trackers] if single else trackers:
        if isinstance(entry, Mapping):
            yield from entry.items()
        elif isinstance(entry, str) or callable(getattr(entry, "log", None)):
            yield entry, {}
        else:
            raise wrong_type("trackers", entry, "a name, or an object with log(figures, step)")


def _open(name: str, arguments: Mapping[str, Any]) -> Tracker:
    if name not in ADAPTERS:
        raise wrong("trackers", name, f"one of {', '.join(ADAPTERS)}")
    make, package = ADAPTERS[name]
    try:
        return make(**arguments)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"trackers: {name} needs {error.name}, which is not installed; pip install {package}"
        ) from None
    except Exception as error:  # of a library, before anything has begun
        raise ConfigError(f"trackers: {name} does not open: {error}") from error


def _rows(samples: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The cells of a table: texts and numbers."""
    return [[_cell(sample[column]) for column in _COLUMNS] for sample in samples]


def _cell(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _markdown_row(cells: Sequence[Any]) -> str:
    texts = ("" if cell is None else str(cell) for cell in cells)
    escaped = (re.sub(r"\s*\n\s*", "<br>", text.replace("|", "\\|")) for text in texts)
    return f"| {' | '.join(escaped)} |"
