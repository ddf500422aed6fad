"""Jobs of Ray: the example as one, packed, run, its output read; and a job that is stopped."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from engines.embedded.tiny_model import make_tiny_model
from tests.support.processes import ROOT, Program, program, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.embedded, pytest.mark.timeout(240)]


def free_ports(num: int) -> list[int]:
    """Below the ports that Ray gives its workers, and all different."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(num)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


@pytest.fixture
def untaught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy that was hardly taught: what it scores does not matter here."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from arithmetic import make_warm_started_model

    make_warm_started_model(tmp_path / "model", 0, num_steps=1)
    return tmp_path / "model"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, because sockets are made in it."""
    path = Path(tempfile.mkdtemp(prefix="rr"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """A head node of its own; ``ray stop`` would end every cluster of the machine."""
    bin_folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    dashboard, *others = free_ports(6)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{dashboard}")
    names = (
        "port",
        "ray-client-server-port",
        "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port",
        "metrics-export-port",
    )
    ports = [f"--{name}={port}" for name, port in zip(names, others, strict=True)]
    with program(
        *("-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", "--num-cpus=8", f"--dashboard-port={dashboard}", *ports),
        *(f"--temp-dir={folder}", f"--object-store-memory={100 * 2**20}"),
    ) as running:
        assert wait_until(lambda: is_up(dashboard), 60), running.output
        yield running
        running.process.terminate()
        running.finish(30)
        assert wait_until(lambda: not running.descendants(), 30), running.descendants()


def is_up(dashboard: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{dashboard}/api/jobs/", trust_env=False).is_success
    except httpx.TransportError:
        return False


def ray(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"RAY_AUTH_MODE": "disabled"}
    return subprocess.run(arguments, cwd=ROOT, env=env, text=True, capture_output=True)


def test_the_example_succeeds_as_a_job_and_its_output_can_be_read(
    head: Program, untaught: Path, tmp_path: Path
) -> None:
    started = time.time()
    done = ray(
        "examples/submit_job.sh",
        *("--steps", "1", "--engines", "1", "--prompts", "4", "--group-size", "4"),
        *("--model", str(untaught), "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"step  1 .*accuracy +\d+\.\d%", done.stdout), done.stdout
    submission = re.search(r"raysubmit_\w+", done.stdout)
    assert submission
    assert "[EVAL RESULT] eval 1:" in ray("ray", "job", "logs", submission[0]).stdout
    assert "succeeded" in ray("ray", "job", "status", submission[0]).stdout
    assert (tmp_path / "colocated_grpo.json").stat().st_mtime > started
    assert wait_until(lambda: not head.descendants("engines."), 30), head.descendants()
    packed = list(Path(head_folder(head)).rglob("working_dir_files/*/*"))
    assert {"examples", "rollout"} <= {path.name for path in packed}
    assert not {".venv", ".git", "runs"} & {path.name for path in packed}


def head_folder(head: Program) -> str:
    (folder,) = (one for one in head.process.args if one.startswith("--temp-dir="))
    return folder.partition("=")[2]


def engines_of(head: Program) -> dict[int, str]:
    return head.descendants("-m engines.embedded")


def test_a_stopped_job_leaves_no_engine(head: Program, tmp_path: Path) -> None:
    groups = {"main": {"num_engines": 2, "engine": {"kind": "embedded", "cpus": 1}}}
    policy = {"model_path": str(make_tiny_model(tmp_path / "tiny")), "groups": groups}
    config = tmp_path / "rollout.yaml"
    config.write_text(json.dumps({"log_dir": str(tmp_path), "servers": {"policy": policy}}))
    serve = ("rollout", "serve", str(config), "--backend", "ray")
    submitted = ray("ray", "job", "submit", "--no-wait", "--submission-id", "served", "--", *serve)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    have_started = wait_until(lambda: len(engines_of(head)) == 2, 90)
    assert have_started, ray("ray", "job", "logs", "served")
    stopped = ray("ray", "job", "stop", "served")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "stopped" in ray("ray", "job", "status", "served").stdout.lower()
    assert wait_until(lambda: not engines_of(head), 30), engines_of(head)
