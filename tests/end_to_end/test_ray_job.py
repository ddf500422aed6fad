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
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from rollout.control.server.journal import read
from rollout.testing.tiny_model import make_tiny_model
from tests.support.builders import write_checkpoint
from tests.support.pages import code_of
from tests.support.processes import ROOT, Program, kill_listener, program, wait_until
from tests.support.ray_worlds import set_up_ray

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.embedded, pytest.mark.timeout(480)]


def free_ports(num: int) -> list[int]:
    """Below the ports that Ray gives its workers, and all different."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(num)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, because sockets are made in it."""
    path = Path(tempfile.mkdtemp(prefix="rr"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Own:
    """What makes a cluster apart from every other on the machine.

    Attributes:
        port: of the head.
        dashboard: its port.
        options: of ``ray start``.
    """

    port: int
    dashboard: int
    options: list[str]


@pytest.fixture
def own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Own:
    """A cluster of its own; ``ray stop`` would end every cluster of the machine."""
    bin_folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    set_up_ray(monkeypatch)
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
    options = [
        *("--disable-usage-stats", "--node-ip-address=127.0.0.1", "--num-cpus=8", *ports),
        *(f"--dashboard-port={dashboard}", f"--temp-dir={folder}"),
        f"--object-store-memory={100 * 2**20}",
    ]
    return Own(others[0], dashboard, options)


@pytest.fixture
def head(own: Own) -> Iterator[Program]:
    """A head node."""
    start = ("-m", "ray.scripts.scripts", "start", "--head", "--block", *own.options)
    with program(*start) as running:
        assert wait_until(lambda: is_up(own.dashboard), 60), running.output
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


# Goes on with the run, or launches it, and ends.
STEP = """
import json, sys
import rollout

config = rollout.RolloutConfig.from_file(sys.argv[1])
try:
    deployment = rollout.connect(config.run_id, backend="ray")
except rollout.ConfigError:
    deployment = rollout.launch(config, backend="ray", detached=True)
with deployment:
    policy = deployment["policy"]
    policy.offload().result(60)
    policy.serve().result(60)
    (group,) = policy.status().result(60).groups
    print("engines:", [engine.pid for engine in group.engines])
    sys.exit("this job fails")
"""


def test_serving_outlives_the_job_that_launched_it(
    own: Own, head: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray keeps the working directory of the job for what is started in it later."""
    job = tmp_path / "job"
    job.mkdir()
    (job / "step.py").write_text(STEP)
    group = {"num_engines": 2, "engine": {"kind": "fake", "weights_cpu_backup": True}}
    policy = {
        "model_path": write_checkpoint(tmp_path),
        "groups": {"main": group},
        "agents": {"workers": 0},
    }
    config = tmp_path / "rollout.yaml"
    settings = {"run_id": "kept", "log_dir": str(tmp_path), "servers": {"policy": policy}}
    config.write_text(json.dumps(settings))
    submit = ("ray", "job", "submit", "--working-dir", str(job), "--", "python", "step.py")

    def engines() -> str:
        done = ray(*submit, str(config))
        assert "this job fails" in done.stdout, done.stdout + done.stderr
        return done.stdout.partition("engines: ")[2].splitlines()[0]

    first = engines()
    router = read(tmp_path / "kept" / "policy" / "journal.json").router_url
    kill_listener(router)  # another one begins in the environment of the job that has ended
    assert engines() == first
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{own.port}")
    stopped = ray("rollout", "stop", "kept", "--ray", "--yes")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert wait_until(lambda: not head.descendants("engines."), 30), head.descendants()


# In the place of the command: every word of the page stays, its cluster is one of its own, and its
# model is not made first.
RAY = """#!/bin/sh
[ "$1" != start ] || set -- "$@" {options}
[ "$1 $2" != "job submit" ] || set -- "$@" --model {model} --prompts 4
exec {python} -m ray.scripts.scripts "$@"
"""
SHELL = "import os, sys; os.execv('/bin/sh', ['sh', '-ec', sys.argv[1]])"


@pytest.mark.timeout(600)
def test_the_page_works_as_printed(
    own: Own, warm_started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "bin" / "ray"
    command.parent.mkdir()
    options = " ".join(own.options)
    # An untaught model gets no rewards, so its pushes change nothing, and doctor finds that.
    command.write_text(RAY.format(options=options, python=sys.executable, model=warm_started))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))  # for the token, and the folder of the job
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{own.port}")  # which `auto` would look for
    page = "how-to/cluster.md"
    with program("-c", SHELL, f"unset RAY_AUTH_MODE; {code_of(page, 'sh', 1)}") as submitted:
        submitted.wait_for("step  1 ", 400)
        commands = f"unset RAY_AUTH_MODE; {code_of(page, 'sh', 2)}"
        done = subprocess.run(["sh", "-ec", commands], cwd=ROOT, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert wait_until(lambda: not engines_of(submitted), 30), engines_of(submitted)
        submitted.finish(60)
    assert (tmp_path / "ray_job").is_dir()
