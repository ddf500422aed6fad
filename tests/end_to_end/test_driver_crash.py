"""The driver is killed at several moments; ``rollout attach`` lists what runs, and cleans up."""

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

import rollout
from engines.process.guard import TOKEN_VARIABLE
from engines.process.process_identity import identify, is_running
from engines.process.tcp_ports import reserve_port
from rollout.cli.main import app
from rollout.config import RolloutConfig
from rollout.control.engine.claim import remove_ended
from rollout.control.server.journal import read
from tests.support.builders import write_checkpoint
from tests.support.engine_keys import Keyless
from tests.support.processes import Program, program, wait_until
from tests.support.ray_worlds import set_up_ray
from tests.support.served_fakes import TIMEOUT_S, ServedEngine

# Launches, waits for a command, offloads, and on others pushes and stops.  Each engine of its own
# holds shared memory as SGLang does.
DRIVER = """
import dataclasses, json, sys, threading
from pathlib import Path
import rollout
from engines.kinds import KINDS
from engines.sglang.environment import CLEANUP
from tests.support.builders import push
from tests.support.processes import wait_until

folder = Path(sys.argv[1])
make = KINDS["fake"].invocation

def with_file(spec, endpoint, inherited):
    start = make(spec, endpoint, inherited)
    hold = 'exec 7> /dev/shm/sglang_loads_rr-test-$$.shm; exec "$@"'
    command = ["sh", "-c", hold, "sh", *start.command]
    return dataclasses.replace(start, command=command, cleanup=CLEANUP)

KINDS["fake"] = dataclasses.replace(KINDS["fake"], invocation=with_file)
config = rollout.RolloutConfig.from_dict(json.loads(sys.argv[2]))
deployment = rollout.launch(config, backend=sys.argv[3])
policy = deployment["policy"]
print("driver: up", flush=True)

def wait_for(name):
    assert wait_until((folder / name).exists, 600)

wait_for("offload")
policy.offload().result()
print("driver: offloaded", flush=True)
wait_for("push")
policy.push(push(1)).result()
print("driver: pushed", flush=True)
wait_for("stop")
print("driver: stopping", flush=True)
deployment.stop()
threading.Event().wait()
"""


class Crash:
    """A driver with one engine of its own and one that was attached."""

    def __init__(
        self,
        folder: Path,
        driver: Program,
        attached: ServedEngine,
        config: dict[str, Any],
        backend: str,
    ) -> None:
        self.folder = folder
        self.driver = driver
        self.config = config
        self.backend = backend
        self.attached = attached
        self.run = folder / "run"

    def tell(self, what: str) -> None:
        (self.folder / what).touch()

    def wait_for(self, what: str) -> None:
        """No other line has these words: "up" is in every one of a group's actor."""
        self.driver.wait_for(f"driver: {what}", TIMEOUT_S)

    def kill(self) -> None:
        self.driver.process.kill()
        self.driver.process.wait(10)

    def kill_with_guards(self) -> None:
        """The driver and the guards; a guard that is stopped does not see the driver end."""
        killed = []
        for pid in self.driver.descendants("engines.fake"):
            with suppress(psutil.NoSuchProcess):  # it ends, because the driver stops
                engine = psutil.Process(pid)
                guard = psutil.Process(engine.ppid())
                assert guard.name() == "engine-guard"
                guard.suspend()
                killed += [engine, guard]
        self.kill()
        for process in reversed(killed):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert wait_until(lambda: not any(map(runs, killed)), TIMEOUT_S)

    def own_files(self) -> list[Path]:
        """The shared memory of the engine that the driver has launched."""
        files = []
        for pid in self.driver.descendants("engines.fake"):
            token = psutil.Process(pid).environ()[TOKEN_VARIABLE]
            files += [f"rollout-engine-{token}/record.json", f"sglang_loads_rr-test-{pid}.shm"]
        return [Path("/dev/shm", name) for name in files]

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


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def crash(tmp_path: Path) -> Iterator[Crash]:
    with driven(tmp_path, "local") as found:
        yield found


@contextmanager
def driven(tmp_path: Path, backend: str, *, is_up: bool = True) -> Iterator[Crash]:
    """A driver; ``is_up``: only when it serves, else held while it starts."""
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
            "weights": {"shared_memory_path": str(tmp_path)},
        }
        config = {"log_dir": str(tmp_path), "servers": {"policy": server}}
        attached = ServedEngine(Keyless(url))
        if not is_up:
            attached.hold("is_ready")
        with program("-c", DRIVER, str(tmp_path), json.dumps(config), backend) as driver:
            if is_up:
                driver.wait_for("driver: up", 2 * TIMEOUT_S)
            else:
                attached.wait_entered("is_ready")
                assert wait_until(lambda: driver.descendants("engines.fake"), TIMEOUT_S)
            try:
                yield Crash(tmp_path, driver, attached, config, backend)
            finally:
                attached.close()
        remove_ended()  # as the next run that attaches an engine


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


@pytest.mark.slow
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
    # The run has not launched the other one, so it goes on.
    left = crash.engines()
    assert left["theirs"]["is_ready"]
    assert crash.attach("--clean-up")["ended"] == []


@pytest.mark.slow
def test_killed_when_offloaded_an_attached_engine_is_listed_as_it_is(crash: Crash) -> None:
    crash.tell("offload")
    crash.wait_for("offloaded")
    crash.kill()
    assert wait_until(lambda: own_has_ended(crash), TIMEOUT_S)
    (server,) = crash.attach()["servers"]
    assert (server["phases"], server["gate"], server["driver_is"]) == (
        {"own": "offloaded", "theirs": "offloaded"},
        "holding",
        "ended",
    )
    assert not crash.engines()["theirs"]["is_ready"]


def serving(crash: Crash) -> None: ...


def starting(crash: Crash) -> None:
    """The attached engine is not ready yet; the guard of the other has noted its files."""
    (record,) = (path for path in crash.own_files() if path.suffix == ".json")
    assert wait_until(lambda: "sglang_loads" in record.read_text(), TIMEOUT_S)


def offloaded(crash: Crash) -> None:
    crash.tell("offload")
    crash.wait_for("offloaded")


def stopping(crash: Crash) -> None:
    for command, done in (("offload", "offloaded"), ("push", "pushed"), ("stop", "stopping")):
        crash.tell(command)
        crash.wait_for(done)


def held_in(operation: str) -> Callable[[Crash], None]:
    """The driver waits for the attached engine's reply to ``operation``."""

    def hold(crash: Crash) -> None:
        crash.attached.hold(operation)
        crash.tell("offload")
        crash.tell("push")
        crash.attached.wait_entered(operation)

    return hold


def resuming_kv(crash: Crash) -> None:
    held_in("update_weights_from_tensor")(crash)
    crash.attached.hold("resume_memory_occupation")
    crash.attached.open("update_weights_from_tensor")
    crash.attached.wait_entered("resume_memory_occupation")


# Phase -> how it is reached, and the command that the journal names.
PHASES: dict[str, tuple[Callable[[Crash], None], str]] = {
    "starting": (starting, ""),
    "serving": (serving, ""),
    "pause_generation": (held_in("pause_generation"), "pause_generation"),
    "flush_cache": (held_in("flush_cache"), "flush_cache"),
    "release_memory_occupation": (
        held_in("release_memory_occupation"),
        "release_memory_occupation",
    ),
    "offloaded": (offloaded, ""),
    "resume weights": (held_in("resume_memory_occupation"), "onload_weights"),
    "push": (held_in("update_weights_from_tensor"), "update_weights"),
    "resume kv": (resuming_kv, "onload_kv"),
    "continue_generation": (held_in("continue_generation"), "continue_generation"),
    "stopping": (stopping, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_driver_and_guards_killed_in_any_phase_leave_nothing_after_the_next_launch(
    phase: str, tmp_path: Path
) -> None:
    reach, doing = PHASES[phase]
    with driven(tmp_path, "local", is_up=phase != "starting") as crash:
        reach(crash)
        files = crash.own_files()
        # It may have ended its engine before the kill.
        assert phase == "stopping" or (all(path.exists() for path in files) and len(files) == 2)
        crash.kill_with_guards()
        (server,) = crash.attach()["servers"]
        assert (server["driver_is"], server["doing"]) == ("ended", doing)
        the_next_launch_clears(crash, files)


def the_next_launch_clears(crash: Crash, files: list[Path]) -> None:
    """Launch the same run again, without the attached engine, which may be paused."""
    pushed = crash.folder / f"rollout-push-{crash.driver.process.pid}-0"
    pushed.mkdir()
    (pushed / ".held").touch()
    folder = crash.run / "policy"
    (folder / ".journal.json.part").touch()  # as if it was killed while it wrote
    groups = {"own": crash.config["servers"]["policy"]["groups"]["own"]}
    policy = {**crash.config["servers"]["policy"], "groups": groups}
    config = RolloutConfig.from_dict({**crash.config, "servers": {"policy": policy}})
    with rollout.launch(config, backend=crash.backend):
        assert not any(path.exists() for path in files)
        assert not pushed.exists()
        assert not crash.driver.descendants()
    assert not list(folder.glob(".*"))
    assert read(folder / "journal.json").is_ended


@pytest.mark.slow
def test_people_read_it_in_words(crash: Crash) -> None:
    os.kill(crash.driver.process.pid, signal.SIGKILL)
    crash.driver.process.wait(10)
    assert wait_until(lambda: own_has_ended(crash), TIMEOUT_S)
    done = CliRunner().invoke(app, ["attach", str(crash.run)])
    assert done.exit_code == 0, done.output
    assert "server policy of run run, launched by local" in done.output
    assert "own serving, theirs serving; gate open, weight version 0" in done.output


@contextmanager
def driven_over_ray(tmp_path: Path) -> Iterator[Crash]:
    # Short, because sockets are made in it and their paths are limited to 107 bytes.
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="rr", ignore_cleanup_errors=True) as folder,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        set_up_ray(patch)
        with driven(tmp_path, "ray") as crash:
            yield crash


@pytest.mark.ray
@pytest.mark.slow
def test_a_driver_killed_after_its_server_had_come_back_leaves_nothing(tmp_path: Path) -> None:
    with driven_over_ray(tmp_path) as crash:
        own, files = crash.own(), crash.own_files()
        journal = crash.run / "policy" / "journal.json"
        lost = read(journal).process
        os.kill(lost.pid, signal.SIGKILL)
        assert wait_until(lambda: read(journal).process != lost, 2 * TIMEOUT_S)
        assert crash.own() == own
        assert is_running(own)
        crash.tell("offload")
        crash.wait_for("offloaded")
        crash.kill()
        assert wait_until(lambda: not is_running(own), TIMEOUT_S)
        assert wait_until(lambda: not any(path.exists() for path in files), TIMEOUT_S)


@pytest.mark.ray
@pytest.mark.chaos
def test_over_ray_too_the_engines_end_with_the_driver_and_the_journal_stays(
    tmp_path: Path,
) -> None:
    with driven_over_ray(tmp_path) as crash:
        own = crash.own()
        crash.kill()
        assert wait_until(lambda: not is_running(own), 2 * TIMEOUT_S)
        (server,) = crash.attach()["servers"]
        assert (server["backend"], server["driver_is"]) == ("ray", "ended")
        assert server["driver"]["pid"] == crash.driver.process.pid
        assert wait_until(lambda: own_has_ended(crash), TIMEOUT_S)
        assert crash.engines()["theirs"]["is_ready"]
