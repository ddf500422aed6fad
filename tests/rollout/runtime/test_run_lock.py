"""One launch of a run id at a time; whatever ends it lets the next one in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from engines.process.locks import FileLock
from rollout.config.run_dir import RunFolder
from rollout.core.errors import ConfigError
from rollout.runtime.local import launch_local
from rollout.runtime.run_lock import RunLock
from tests.support.line_kills import killed_at_each_line
from tests.support.served_fakes import config, fail_to_make, launched

HOLD = """
import sys
from contextlib import suppress
from pathlib import Path
from rollout.config.run_dir import RunFolder
from rollout.runtime.run_lock import RunLock
lock = RunLock(RunFolder(Path(sys.argv[1]), "exp"))
print("held", flush=True)
sys.stdin.read()
"""


def run_of(folder: Path) -> RunFolder:
    return RunFolder(folder / "exp", "exp")


@pytest.mark.torch
def test_a_second_launch_is_refused_and_overwrites_nothing(tmp_path: Path) -> None:
    with launched(launch_local, tmp_path, run_id="exp") as first:
        run = RunFolder.of(first.config)
        before = {
            path: path.read_bytes()
            for path in (run.path / "launch.json", *run.of_server("policy").glob("*.json"))
        }
        with pytest.raises(ConfigError, match="run_id = 'exp': this run is launched already") as no:
            launch_local(config(tmp_path, run_id="exp"))
        assert f"by process {os.getpid()} on" in str(no.value)
        assert "another run_id" in str(no.value)
        assert no.value.setting == "run_id"
        assert {path: path.read_bytes() for path in before} == before
        with launched(launch_local, tmp_path, run_id="exp-2") as other:
            assert other["policy"].status().result(30).phase == "serving"
    with launched(launch_local, tmp_path, run_id="exp"):
        assert run.last_launch() not in before[run.path / "launch.json"].decode()


def test_a_run_that_outlives_its_script_is_named_with_what_goes_on_with_it(tmp_path: Path) -> None:
    first = RunLock(run_of(tmp_path), is_detached=True)
    way_out = r"connect\('exp', backend='ray'\)\), end it \(rollout stop exp --ray\), or choose"
    with pytest.raises(ConfigError, match=way_out):
        RunLock(run_of(tmp_path))
    first.release()
    second = RunLock(run_of(tmp_path))
    with pytest.raises(ConfigError, match=r"end it \(rollout stop /"):
        RunLock(run_of(tmp_path))
    second.release()


def test_a_launch_that_fails_leaves_the_run_to_the_next(tmp_path: Path) -> None:
    from engines.fake.http_fake import HttpFakeLauncher

    with pytest.raises(Exception, match="no such model layer"):
        launch_local(config(tmp_path), launcher=HttpFakeLauncher(fail_to_make))
    with launched(launch_local, tmp_path) as deployment:
        assert deployment["policy"].status().result(30).phase == "serving"


def test_a_kill_releases_the_run(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_of(tmp_path).path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"by process {holder.pid} on"):
            RunLock(run_of(tmp_path))
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
    RunLock(run_of(tmp_path)).release()


def has_open(name: str) -> bool:
    """Whether this process has a file of this name open."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(name):
                return True
    return False


def test_a_forked_child_does_not_hold_the_run(tmp_path: Path) -> None:
    lock = RunLock(run_of(tmp_path))
    child = os.fork()
    if not child:
        os._exit(has_open("launch.json"))
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(ConfigError, match="launched already"):
        RunLock(run_of(tmp_path))  # what the child closed does not release the parent's
    lock.release()
    RunLock(run_of(tmp_path)).release()


def test_a_release_can_be_repeated_and_the_id_of_the_launch_stays(tmp_path: Path) -> None:
    lock = RunLock(run_of(tmp_path))
    held = run_of(tmp_path).last_launch()
    lock.release()
    lock.release()
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", held)
    assert run_of(tmp_path).last_launch() == held


def test_a_kill_at_any_line_of_a_launch_leaves_the_last_launch_or_this_one(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    RunLock(run).release()
    seen = [run.last_launch()]
    for is_killed in killed_at_each_line(FileLock.write, lambda: RunLock(run).release()):
        seen.append(run.last_launch())
        assert seen[-1]
        assert not is_killed or seen[-1] in (seen[0], seen[-2])
    assert len(set(seen)) > 1


def test_a_file_system_without_locks_is_no_reason_not_to_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    RunLock(run_of(tmp_path)).release()
    assert "cannot be locked: [Errno 37] No locks available" in caplog.text
