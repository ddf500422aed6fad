"""A run of tests that is ended from outside leaves no engine of its fixtures."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollout.testing.tiny_model import make_tiny_model
from tests.support.processes import program, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.embedded, pytest.mark.timeout(300)]
RUN = """
import threading

import pytest
from tests.engines.embedded.engine_client import Server

@pytest.fixture(scope="session")
def server():
    server = Server({model!r})
    yield server.wait_until_ready()
    server.stop()

def test_it(server):
    with open({started!r}, "w") as file:
        file.write(str(server.process.report.pid))
    threading.Event().wait()
"""
AS_MAKE = "import os, sys; os.execvp('make', ['make', '-f', *sys.argv[1:]])"


@pytest.fixture(autouse=True)
def ends_of_a_hangup() -> Iterator[None]:
    """Under nohup every process that we start ignores the hangup; this run itself goes on to."""
    was = signal.getsignal(signal.SIGHUP)
    if was is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)  # a program does not inherit it
    yield
    signal.signal(signal.SIGHUP, was)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("pytest", signal.SIGTERM),
        ("pytest", signal.SIGKILL),
        ("pytest", signal.SIGINT),
        ("xdist", signal.SIGTERM),
        ("xdist", signal.SIGKILL),
        ("group", signal.SIGHUP),
        ("make", signal.SIGTERM),
    ],
)
def test_its_engine_ends_with_it(tmp_path: Path, how: str, number: signal.Signals) -> None:
    started = tmp_path / "started"
    model = make_tiny_model(tmp_path / "model")
    (tmp_path / "test_run.py").write_text(RUN.format(model=str(model), started=str(started)))
    workers = "1" if how in ("xdist", "group") else "0"
    run = ["-m", "pytest", "-p", "no:cacheprovider", "-n", workers, str(tmp_path)]
    makefile = tmp_path / "Makefile"
    makefile.write_text(f"run:\n\t{sys.executable} {' '.join(run)}\n")
    with program(*(("-c", AS_MAKE, str(makefile)) if how == "make" else run)) as running:
        assert wait_until(started.exists, 120), running.output
        assert running.descendants("-m engines.embedded")
        if how == "group":
            os.killpg(running.process.pid, number)
        else:
            running.process.send_signal(number)
        assert wait_until(lambda: not running.descendants(), 60), running.descendants()
