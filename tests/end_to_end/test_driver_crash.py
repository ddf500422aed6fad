"""The driver is killed at several moments; ``rollout attach`` says what is left and what to do."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from engines.identity import identify, is_running
from engines.ports import reserve_port
from rollout.cli import app
from rollout.journal import read
from tests.support.builders import write_checkpoint
from tests.support.processes import Program, program, wait_until
from tests.support.served_fakes import TIMEOUT_S, ServedEngine

# Launches, waits until it is told, offloads, and if it is told that too, pushes.
DRIVER = """
import json, sys, time
from pathlib import Path
import rollout
from tests.support.builders import push

folder = Path(sys.argv[1])
config = rollout.RolloutConfig.from_dict(json.loads(sys.argv[2]))
deployment = rollout.launch(config, backend=sys.argv[3])
policy = deployment["policy"]
print("up", flush=True)

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)

wait_for("offload")
policy.offload().result()
print("offloaded", flush=True)
wait_for("push")
policy.onload_push(push(1)).result()
print("pushed", flush=True)
time.sleep(600)
"""


class Crash:
    """A driver with one engine of its own and one that was attached."""

    def __init__(self, folder: Path, driver: Program, url: str) -> None:
        self.folder = folder
        self.driver = driver
        self.attached = ServedEngine(url)
        self.run = folder / "run"

    def tell(self, what: str) -> None:
        (self.folder / what).touch()

    def kill(self) -> None:
        self.driver.process.kill()
        self.driver.process.wait(10)

    def own(self) -> Any:
        record = read(self.run / "policy" / "journal.json")
        (entry,) = [one for one in record.engines if one.group == "own"]
        return entry.processes[0]

    def attach(self, *options: str, status: int = 0) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["attach", str(self.run), "--json", *options])
        assert done.exit_code == status, (done.output, done.exception)
        found: dict[str, Any] = json.loads(done.output) if not status else {"said": done.exception}
        return found

    def engines(self, *options: str) -> dict[str, dict[str, Any]]:
        (server,) = self.attach(*options)["servers"]
        return {one["group"]: one for one in server["engines"]}


@pytest.fixture
def crash(tmp_path: Path) -> Iterator[Crash]:
    with driven(tmp_path, "local") as found:
        yield found


@contextmanager
def driven(tmp_path: Path, backend: str) -> Iterator[Crash]:
    with reserve_port() as reserved:
        port = reserved.port
    with program("-m", "engines.fake", "--port", str(port)) as engine:
        engine.wait_for("listens", TIMEOUT_S)
        url = f"http://127.0.0.1:{port}"
        groups = {
            "own": {"engine": {"kind": "fake"}},
            "theirs": {"engine": {"kind": "attached", "urls": [url]}},
        }
        server = {
            "model_path": write_checkpoint(tmp_path),
            "groups": groups,
            "page": {"enabled": False},
        }
        config = {"log_dir": str(tmp_path), "servers": {"policy": server}}
        with program("-c", DRIVER, str(tmp_path), json.dumps(config), backend) as driver:
            driver.wait_for("up", 2 * TIMEOUT_S)
            found = Crash(tmp_path, driver, url)
            try:
                yield found
            finally:
                found.attached.close()


@contextmanager
def stopped_at(crash: Crash, operation: str) -> Iterator[None]:
    """The driver waits for the attached engine's answer to ``operation``, and is killed there."""
    crash.attached.hold(operation)
    yield
    crash.attached.wait_entered(operation)
    crash.kill()
    crash.attached.open(operation)


def own_has_ended(crash: Crash) -> bool:
    return crash.engines()["own"]["process"] == "ended"


def test_a_run_that_is_driven_is_shown_and_not_touched(crash: Crash) -> None:
    (server,) = crash.attach()["servers"]
    assert (server["driver_is"], server["phases"]) == (
        "runs",
        {"own": "serving", "theirs": "serving"},
    )
    said = crash.attach("--clean-up", status=1)["said"]
    assert "still runs and drives these engines" in str(said)
    assert crash.engines()["own"]["is_ready"]


def test_killed_while_it_serves_an_engine_whose_guard_fails_too_is_ended_by_clean_up(
    crash: Crash,
) -> None:
    own = crash.own()
    guard = identify(psutil.Process(own.pid).ppid())
    assert guard is not None
    os.kill(guard.pid, signal.SIGSTOP)
    crash.kill()
    left = crash.engines()
    assert (left["own"]["process"], left["own"]["pids"]) == ("runs", [own.pid])
    ended = crash.attach("--clean-up")
    assert ended["ended"] == ["own-0 (1 processes)"]
    assert not is_running(own)
    assert not is_running(guard)
    # Who launched the other one is to end it.
    left = crash.engines("--adopt")
    assert left["theirs"]["is_ready"]
    assert crash.attach("--clean-up")["ended"] == []


def test_killed_when_offloaded_nothing_is_made_to_serve(crash: Crash) -> None:
    crash.tell("offload")
    crash.driver.wait_for("offloaded", TIMEOUT_S)
    crash.kill()
    assert wait_until(lambda: own_has_ended(crash), TIMEOUT_S)
    told = crash.attach("--adopt")
    assert told["adopted"] == []
    (server,) = told["servers"]
    assert (server["phases"], server["gate"], server["driver_is"]) == (
        {"own": "offloaded", "theirs": "offloaded"},
        "holding",
        "ended",
    )
    theirs = crash.engines()["theirs"]
    assert "its memory is released" in theirs["why_not_usable"]
    assert not theirs["is_ready"]


@pytest.mark.chaos
def test_killed_in_a_pause_an_attached_engine_can_be_adopted(crash: Crash) -> None:
    with stopped_at(crash, "pause_generation"):
        crash.tell("offload")
    assert wait_until(lambda: own_has_ended(crash), TIMEOUT_S)
    (server,) = crash.attach()["servers"]
    assert server["doing"] == "pause"
    assert wait_until(lambda: not crash.engines()["theirs"]["is_ready"], TIMEOUT_S)
    told = crash.attach("--adopt")
    assert told["adopted"] == [crash.engines()["theirs"]["url"]]
    assert crash.engines()["theirs"]["is_ready"]


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("operation", "doing"),
    [
        ("release_memory_occupation", "release"),
        ("resume_memory_occupation", "resume_weights"),
        ("update_weights_from_tensor", "update_weights"),
    ],
)
def test_killed_in_the_middle_of_what_cannot_be_repeated_nothing_is_adopted(
    crash: Crash, operation: str, doing: str
) -> None:
    with stopped_at(crash, operation):
        crash.tell("offload")
        crash.tell("push")
    assert wait_until(lambda: own_has_ended(crash), TIMEOUT_S)
    told = crash.attach("--adopt")
    assert told["adopted"] == []
    (server,) = told["servers"]
    assert server["doing"] == doing
    assert f"in the middle of {doing}" in crash.engines()["theirs"]["why_not_usable"]


def test_people_are_told_in_words(crash: Crash) -> None:
    os.kill(crash.driver.process.pid, signal.SIGKILL)
    crash.driver.process.wait(10)
    assert wait_until(lambda: own_has_ended(crash), TIMEOUT_S)
    done = CliRunner().invoke(app, ["attach", str(crash.run), "--adopt"])
    assert done.exit_code == 0, done.output
    assert "server policy of run run, launched by local" in done.output
    assert "own serving, theirs serving; gate open, weight version 0" in done.output
    assert "engine: {kind: attached, urls: [http://127.0.0.1:" in done.output


@pytest.mark.ray
@pytest.mark.chaos
def test_over_ray_too_the_engines_end_with_the_driver_and_the_journal_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short, because sockets are made in it and their paths are limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="rr", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        with driven(tmp_path, "ray") as crash:
            own = crash.own()
            crash.kill()
            assert wait_until(lambda: not is_running(own), 2 * TIMEOUT_S)
            (server,) = crash.attach()["servers"]
            assert (server["backend"], server["driver_is"]) == ("ray", "ended")
            assert server["driver"]["pid"] == crash.driver.process.pid
            assert wait_until(lambda: own_has_ended(crash), TIMEOUT_S)
            assert crash.attach("--adopt")["adopted"] == [crash.engines()["theirs"]["url"]]
