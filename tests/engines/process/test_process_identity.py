"""Processes found again by what they are, and nothing else taken for them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engines.process.guarded_process import GuardedProcess
from engines.process.process_identity import (
    end,
    identify,
    is_running,
    pids_of,
    resident_bytes,
    terminate,
)
from engines.protocol import ProcessIdentity
from tests.support.processes import program, wait_until

# A child in a session of its own, and one that carries none of its parent's environment.
ENGINE = """
import signal, subprocess, sys
hangs = [sys.executable, "-c", "import signal; signal.pause()"]
subprocess.Popen(hangs, start_new_session=True)
subprocess.Popen(hangs, env={})
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[GuardedProcess]:
    log = tmp_path / "log"
    one = GuardedProcess([sys.executable, "-c", ENGINE], env=os.environ, log_path=log)
    try:
        assert wait_until(lambda: "ready" in log.read_text(), 20)
        one.hear()
        yield one
    finally:
        one.send(b"k")
        assert wait_until(lambda: one.hear() or one.is_gone or one.is_lost, 20)


def identity_of(guarded: GuardedProcess) -> ProcessIdentity:
    assert guarded.report.identity is not None
    return guarded.report.identity


def test_an_engine_is_found_with_all_it_started_and_ended_whole(guarded: GuardedProcess) -> None:
    identity = identity_of(guarded)
    assert is_running(identity)
    pids = pids_of(identity)
    assert len(pids) == 3
    assert guarded.report.guard_pid not in pids
    assert resident_bytes([identity]) > 3 * 2**20
    assert end(identity) >= 1
    assert not is_running(identity)
    assert pids_of(identity) == []
    assert resident_bytes([identity]) == 0
    assert end(identity) == 0


def test_what_a_killed_guard_left_is_found_by_its_token(guarded: GuardedProcess) -> None:
    identity = identity_of(guarded)
    guarded.note()
    assert guarded.report.guard_pid is not None
    os.kill(guarded.report.guard_pid, 9)
    assert wait_until(lambda: not is_running(identity), 10)
    # The one with its parent's environment; who carries nothing and has no parent is lost.
    assert len(pids_of(identity)) == 1
    assert end(identity) == 1
    assert pids_of(identity) == []
    assert wait_until(lambda: not guarded.sweep(), 10)


def test_a_pid_that_was_given_to_another_process_is_not_touched() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        mine = identify(other.pid)
        assert mine is not None
        before = replace(mine, started=mine.started - 1)
        assert not is_running(before)
        assert pids_of(before) == []
        assert end(before) == 0
        assert other.poll() is None


@pytest.mark.parametrize("other", [{"boot_id": "0c9d7f5e-0000"}, {"namespace": "pid:[1]"}], ids=str)
def test_nothing_of_another_boot_or_container_is_found(other: dict[str, str]) -> None:
    mine = identify(os.getpid())
    assert mine is not None
    assert is_running(mine)
    elsewhere = replace(mine, **other)
    assert not is_running(elsewhere)
    assert pids_of(elsewhere) == []
    assert end(elsewhere) == 0
    assert terminate(elsewhere, 0.0)


def test_sigterm_goes_to_that_very_process_which_is_awaited() -> None:
    late = (
        "import signal; signal.signal(15, lambda *_: print('asked', flush=True));"
        "print('up', flush=True); [signal.pause() for _ in range(9)]"
    )
    with program("-c", late) as other:
        other.wait_for("up", 20)
        mine = identify(other.process.pid)
        assert mine is not None
        assert terminate(replace(mine, started=mine.started - 1), 0.0)
        assert not terminate(mine, 0.01)
        other.wait_for("asked", 20)
    with program("-c", "import signal; print('up', flush=True); signal.pause()") as other:
        other.wait_for("up", 20)
        mine = identify(other.process.pid)
        assert mine is not None
        assert terminate(mine, 30)
        assert not is_running(mine)


def test_a_process_that_has_ended_has_no_identity() -> None:
    with program("-c", "print('up'); input()") as one:
        one.wait_for("up", 20)
        pid = one.process.pid
    assert identify(pid) is None
