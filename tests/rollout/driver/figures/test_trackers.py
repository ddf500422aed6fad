"""Trackers get the figures and samples of each step, over doubles and over the packages."""

from __future__ import annotations

import json
import re
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import ConfigError
from rollout.driver.driver import Driver
from rollout.driver.figures import trackers as adapters
from rollout.driver.figures.keys import SAMPLES, STEP
from rollout.driver.figures.trackers import open_trackers
from tests.support.driving import SAMPLING, always, driving, engines, prompts
from tests.support.fake_generation_client import FakeGenerationClient
from tests.support.tracker_doubles import Mine, Mlflow, Trackio, Wandb
from tests.support.virtual_time import virtual_time

MEAN = "rollout/reward/mean"


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    doubles = {"wandb": Wandb(), "mlflow": Mlflow(), "trackio": Trackio()}
    for name, double in doubles.items():
        monkeypatch.setitem(sys.modules, name, double)
    return doubles


@virtual_time
async def two_steps(trackers: Any, **settings: Any) -> None:
    """Steps 3 and 4, each of one group of two samples."""
    of = engines(0.01)
    async with driving(of, always(0.5), trackers=trackers, **settings) as (driver, _):
        for step in (3, 4):
            await driver.rollout(step, prompts(1), group_size=2, sampling=SAMPLING)


# -- each of the four -----------------------------------------------------------------------------


def test_wandb_gets_figures_and_a_table_under_a_step_of_their_own(packages: Any) -> None:
    two_steps({"wandb": {"project": "grpo"}})
    run = packages["wandb"].run
    assert packages["wandb"].projects == ["grpo"]
    figures = [logged for logged in run.logged if MEAN in logged]
    assert [(logged[STEP], logged[MEAN]) for logged in figures] == [(3, 0.5), (4, 0.5)]
    tables = [logged[SAMPLES] for logged in run.logged if SAMPLES in logged]
    assert [len(table.data) for table in tables] == [2, 2]
    row = dict(zip(tables[0].columns, tables[0].data[0], strict=True))
    assert (row["reward"], row["engines"], row["tokens"]) == (0.5, "fake-0", 10)
    assert run.metrics["rollout/*"] == run.metrics["server/*"] == STEP
    assert run.is_finished


def test_mlflow_gets_figures_and_a_table_for_each_step(packages: Any) -> None:
    mlflow = packages["mlflow"]
    two_steps({"mlflow": {"experiment_name": "grpo", "run_name": "first"}})
    assert mlflow.experiment == "grpo"
    assert [(step, logged[MEAN]) for step, logged in mlflow.metrics["run-0"]] == [
        (3, 0.5),
        (4, 0.5),
    ]
    assert list(mlflow.tables) == [f"{SAMPLES}/00000003.json", f"{SAMPLES}/00000004.json"]
    assert mlflow.tables[f"{SAMPLES}/00000003.json"]["reward"] == [0.5, 0.5]
    assert mlflow.ended == ["run-0"]
    assert mlflow.active_run() is None, "that of the program's thread stays free"


def test_a_name_that_mlflow_refuses_is_changed(packages: Any) -> None:
    (tracker,) = open_trackers("mlflow")
    tracker.log({"rollout/rejected/50% @ short": 1.0}, 1)
    ((_, logged),) = packages["mlflow"].metrics["run-0"]
    assert logged == {"rollout/rejected/50_ _ short": 1.0}


def test_trackio_gets_figures_and_a_table(packages: Any) -> None:
    two_steps("trackio")
    (run,) = packages["trackio"].runs
    assert run.project == "rollout"
    steps = [(step, logged[MEAN]) for step, logged in run.logged if MEAN in logged]
    assert steps == [(3, 0.5), (4, 0.5)]
    assert [step for step, logged in run.logged if SAMPLES in logged] == [3, 4]
    assert run.is_finished
    assert packages["trackio"].context_vars.current_run.get() is None


def events(folder: Path) -> Iterator[tuple[int, str, Any]]:
    """Step, tag and value of what TensorBoard reads."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = folder.glob("events.*")
    content = file.read_bytes()
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        event, content = Event.FromString(content[12 : 12 + size]), content[16 + size :]
        yield from ((event.step, value.tag, value) for value in event.summary.value)


def test_tensorboard_gets_figures_and_a_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    two_steps([{"tensorboard": {"logdir": str(tmp_path)}}])
    found = list(events(tmp_path))
    assert [(step, value.simple_value) for step, tag, value in found if tag == MEAN] == [
        (3, 0.5),
        (4, 0.5),
    ]
    texts = [
        (step, value.tensor.string_val[0].decode())
        for step, tag, value in found
        if tag == f"{SAMPLES}/text_summary"
    ]
    assert [step for step, _ in texts] == [3, 4]
    head, line, *rows = texts[0][1].splitlines()
    assert head == "| prompt | reply | reward | tokens | engines | versions | status |"
    assert line.count("---") == 7
    assert [row.count("| 0.5 | 10 | fake-0 |") for row in rows] == [1, 1]


def test_a_table_in_markdown_has_one_line_for_each_sample() -> None:
    assert adapters._markdown_row(["a | b\n\n c", None, 1]) == "| a \\| b<br>c |  | 1 |"


# -- runs that the program has open ---------------------------------------------------------------


def test_an_open_run_is_used_and_stays_open(packages: Any) -> None:
    """The driver of a training script works in another thread."""
    wandb, mlflow, trackio = packages["wandb"], packages["mlflow"], packages["trackio"]
    mine = wandb.init(project="mine"), mlflow.start_run(), trackio.init("mine")
    client = FakeGenerationClient(engines(0.001))
    names = ["wandb", "mlflow", "trackio"]
    with Driver("http://nowhere", always(1.0), client=client, trackers=names) as driver:
        driver.rollout(0, prompts(1), group_size=1, sampling=SAMPLING).result(20)
    assert wandb.projects == ["mine"]
    assert list(mlflow.metrics) == [mine[1].info.run_id]
    assert trackio.runs == [mine[2]]
    logged = mine[0].logged[0], mlflow.metrics["run-0"][0][1], mine[2].logged[0][1]
    assert [figures[MEAN] for figures in logged] == [1.0] * 3
    assert not mine[0].is_finished
    assert not mine[2].is_finished
    assert mlflow.ended == []


# -- objects of the user, errors ------------------------------------------------------------------


def test_an_object_gets_figures_and_samples_and_is_closed() -> None:
    mine = Mine()
    two_steps(mine, num_shown_samples=1)
    assert [step for step, _ in mine.figures] == [3, 4]
    assert [(step, len(samples)) for step, samples in mine.samples] == [(3, 1), (4, 1)]
    assert mine.is_closed


def test_an_object_needs_only_log() -> None:
    logged: list[int] = []

    class Short:
        def log(self, figures: Any, step: int) -> None:
            logged.append(step)

    two_steps([Short(), Short()])
    assert sorted(logged) == [3, 3, 4, 4]


def test_no_samples_make_no_table() -> None:
    mine = Mine()
    two_steps(mine, num_shown_samples=0)
    assert len(mine.figures) == 2
    assert mine.samples == []


def test_errors_are_logged_once_and_end_no_step(caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = Mine(OSError("disk full"), OSError("disk full")), Mine()
    two_steps([broken, whole])
    assert len(whole.figures) == 2
    assert broken.is_closed
    texts = [record.message for record in caplog.records]
    assert [text for text in texts if "disk full" in text] == [
        text for text in texts if text.startswith("tracker Mine raised OSError('disk full')")
    ]
    assert len([text for text in texts if "disk full" in text]) == 1
    assert "tracker Mine: the figures of 2 steps are lost there" in texts


def test_a_tracker_that_hangs_delays_the_close_by_its_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapters, "_CLOSE_S", 0.1)
    goes_on, ended = threading.Event(), threading.Event()

    class Hangs(Mine):
        def log(self, figures: Any, step: int) -> None:
            goes_on.wait(20)

        def close(self) -> None:
            ended.set()

    two_steps(Hangs())
    assert "tracker Hangs still runs as the driver is closed" in caplog.text
    assert "the metrics of the last 1 steps" in caplog.text
    goes_on.set()
    assert ended.wait(10)


def test_a_tracker_that_hangs_does_not_hide_why_no_driver_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "_CLOSE_S", 0.1)
    goes_on = threading.Event()

    class Hangs(Mine):
        def close(self) -> None:
            goes_on.wait()

    with pytest.raises(ValueError, match="wandbb"):
        Driver("http://nowhere", trackers=[Hangs(), "wandbb"])
    goes_on.set()


@pytest.mark.parametrize(
    ("trackers", "error", "message"),
    [
        ("wandbb", ValueError, "one of wandb, tensorboard, mlflow, trackio"),
        ([3], TypeError, "an object with log(figures, step)"),
        ({"wandb": {"colour": 1}}, ConfigError, "trackers: wandb does not open"),
    ],
)
def test_a_wrong_tracker_is_refused_at_once(
    trackers: Any, error: type[Exception], message: str, packages: Any
) -> None:
    with pytest.raises(error) as refused:
        Driver("http://nowhere", trackers=trackers)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", adapters.ADAPTERS)
def test_a_missing_package_is_named_with_its_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = adapters.ADAPTERS[name][1]
    monkeypatch.setitem(sys.modules, package, None)
    mine = Mine()
    with pytest.raises(ConfigError, match=rf"{name} needs {package}.*pip install {package}"):
        Driver("http://nowhere", trackers=[mine, name])
    assert mine.is_closed


def test_a_driver_that_is_not_made_leaves_no_run_open(packages: Any) -> None:
    with pytest.raises(ValueError, match="url = 'nowhere'"):
        Driver("nowhere", trackers="wandb")
    assert packages["wandb"].run.is_finished


# -- the packages themselves ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_package_itself_keeps_figures_and_samples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is installed: ``pip install wandb mlflow trackio``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    package = pytest.importorskip(name)
    arguments: dict[str, Any] = {
        "wandb": {"project": "grpo", "mode": "offline", "dir": str(tmp_path)},
        "mlflow": {"tracking_uri": f"file://{tmp_path}/mlruns", "experiment_name": "grpo"},
        "trackio": {"project": "grpo", "embed": False},
    }
    two_steps({name: arguments[name]})
    if name == "wandb":
        package.teardown()  # its process is that of all runs
    assert KEPT[name](tmp_path) == ([(3, 0.5), (4, 0.5)], [2, 2])


def kept_by_wandb(folder: Path) -> tuple[list[tuple[int, float]], list[int]]:
    """Offline, its figures are in a file of its own form, in their order."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    mean = rb"%s\x82\x01\x03(0\.5)" % MEAN.encode()
    step = rb"%s\x82\x01\x01(\d)" % STEP.encode()
    found = re.findall(mean + rb".*?" + step, file.read_bytes(), re.DOTALL)
    files = folder.glob("wandb/offline-run-*/**/*.table.json")
    tables = [json.loads(path.read_text()) for path in files]
    # Each is there twice: in the history and in the summary.
    steps = dict.fromkeys((int(number), float(value)) for value, number in found)
    return list(steps), [len(table["data"]) for table in tables]


def kept_by_mlflow(folder: Path) -> tuple[list[tuple[int, float]], list[int]]:
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("grpo")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, MEAN)
    paths = [file.path for file in client.list_artifacts(run.info.run_id, SAMPLES)]
    tables = [mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/{path}") for path in paths]
    return [(entry.step, entry.value) for entry in history], [len(one["data"]) for one in tables]


def kept_by_trackio(folder: Path) -> tuple[list[tuple[int, float]], list[int]]:
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("grpo")
    logs = SQLiteStorage.get_logs("grpo", run)
    tables = [log[SAMPLES] for log in logs if SAMPLES in log]
    steps = [(log["step"], log[MEAN]) for log in logs if MEAN in log]
    return steps, [len(table["_value"]) for table in tables]


KEPT = {"wandb": kept_by_wandb, "mlflow": kept_by_mlflow, "trackio": kept_by_trackio}
