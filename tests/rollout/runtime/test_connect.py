"""A run that one process has launched is used from others, and by its user only."""

from __future__ import annotations

import os
import pickle
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rollout
from rollout.cli.main import app
from rollout.control.server.journal import read
from rollout.core.errors import ActorLost, ConfigError, WeightMismatch
from rollout.runtime import control_socket
from rollout.runtime.control_socket import ControlAddress, SocketCaller
from rollout.runtime.handle import DeploymentHandle, RunHandle
from rollout.runtime.local import launch_local
from tests.support.served_fakes import launched

LAUNCHER = """
import sys
from pathlib import Path
from rollout.runtime.local import launch_local
from tests.support.served_fakes import launched
with launched(launch_local, Path(sys.argv[1]), run_id="exp"):
    print("launched", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DeploymentHandle]:
    with launched(launch_local, tmp_path, run_id="exp") as deployment:
        yield deployment


def address_of(run: DeploymentHandle) -> ControlAddress:
    journal = read(run_folder(run) / "policy" / "journal.json")
    host, _, port = journal.control.rpartition(":")
    return ControlAddress(host, int(port), journal.key)


def run_folder(run: DeploymentHandle) -> Path:
    return Path(run.config.log_dir) / "exp"


def test_a_forked_child_uses_the_handle_that_it_inherits(run: DeploymentHandle) -> None:
    policy = run["policy"]
    child = os.fork()
    if not child:
        os._exit(0 if policy.status().result(30).phase == "serving" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_another_process_uses_the_run(run: DeploymentHandle) -> None:
    child = (
        "import sys, rollout\n"
        "policy = rollout.connect(sys.argv[1])['policy']\n"
        "assert policy.offload().result(30).phase_s\n"
        "print(policy.status().result(30).phase, policy.weight_version)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", child, str(run_folder(run))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["mixed", "0"], done.stderr
    assert run["policy"].status().result(30).phase == "mixed"  # the group "apart" own their GPUs


@pytest.mark.torch
def test_the_version_is_the_servers(run: DeploymentHandle) -> None:
    torch = pytest.importorskip("torch")
    other = rollout.connect(run_folder(run))["policy"]
    manifest = other._caller.call(type_of_server().expected_manifest).result(30)
    assert manifest is not None
    weights = {
        name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        for name, spec in manifest.tensors.items()
    }
    assert run["policy"].push(weights).result(30).weight_version == 1
    assert other.push(weights).result(30).weight_version == 2
    assert run["policy"].weight_version == 2
    assert run["policy"].push(weights).result(30).weight_version == 3
    with pytest.raises(WeightMismatch, match="no tensor 'wrong'"):
        other.push({"wrong": torch.zeros(1)})


def test_the_folder_of_a_server_leads_to_its_run(run: DeploymentHandle) -> None:
    found = rollout.connect(run_folder(run) / "policy")
    assert found["policy"].url == run["policy"].url


def type_of_server() -> type:
    from rollout.control.server.server import RolloutServer

    return RolloutServer


def test_handles_can_be_pickled(run: DeploymentHandle) -> None:
    policy = pickle.loads(pickle.dumps(run["policy"]))
    assert policy.status().result(30).phase == "serving"
    again = pickle.loads(pickle.dumps(policy))
    assert again.url == run["policy"].url
    servers = pickle.loads(pickle.dumps(run))
    assert type(servers) is RunHandle
    assert list(servers) == ["policy"]


def test_the_key_is_for_the_user_alone_and_goes_with_the_launch(tmp_path: Path) -> None:
    with launched(launch_local, tmp_path, run_id="exp") as run:
        folder = run_folder(run)
        key = address_of(run).key
        files = [file for file in folder.rglob("*") if file.is_file()]
        with_key = [file for file in files if key.encode() in file.read_bytes()]
        assert with_key == [folder / "policy" / "journal.json"]
        assert stat.S_IMODE(with_key[0].stat().st_mode) == 0o600
        handle = rollout.connect(folder)["policy"]
        attached = CliRunner().invoke(app, ["attach", str(folder), "--json"]).output
        assert handle.url in attached
        assert key not in attached + repr(read(with_key[0]))
    assert key not in with_key[0].read_text()
    with pytest.raises(ActorLost, match="does not answer"):
        handle.status().result(30)
    with pytest.raises(ConfigError, match=r"no launch of run .*journal\.json"):
        rollout.connect(folder, backend="local")


def test_a_wrong_key_is_refused_and_the_run_goes_on(run: DeploymentHandle) -> None:
    where = address_of(run)
    with pytest.raises(ConfigError, match="refused the key"):
        rollout.connect("exp", address=f"{where.host}:{where.port}", key="wrong")
    with pytest.raises(ConfigError, match="needs the key"):
        rollout.connect("exp", address=f"{where.host}:{where.port}")
    with pytest.raises(ConfigError, match="must be host:port"):
        rollout.connect("exp", address="nonsense", key="k")
    found = rollout.connect("exp", address=f"{where.host}:{where.port}", key=where.key)
    assert found["policy"].status().result(30).phase == "serving"


@pytest.mark.parametrize("method", ["_check_push", "stop", "start", "timeline", "no_such"])
def test_only_commands_of_a_server_can_be_called(run: DeploymentHandle, method: str) -> None:
    caller = SocketCaller(address_of(run), "policy")
    with pytest.raises(ConfigError, match=f"'{method}' is not a command"):
        caller.request(method).result(30)


def test_an_error_of_the_server_comes_back_whole(run: DeploymentHandle) -> None:
    policy = rollout.connect(run_folder(run))["policy"]
    with pytest.raises(rollout.LifecycleError) as refused:
        policy.phases.onload_kv().result(30)
    assert refused.value.command == "onload_kv"


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_caller_waits_no_longer_than_the_launching_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    monkeypatch.setattr(control_socket, "_SILENCE_S", 1.0)
    monkeypatch.setattr(control_socket, "_HANDSHAKE_S", 1.0)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    assert launcher.stdin is not None
    try:
        assert launcher.stdout.readline() == "launched\n"
        policy = rollout.connect(tmp_path / "exp")["policy"]
        os.kill(launcher.pid, signal.SIGKILL if is_killed else signal.SIGSTOP)
        with pytest.raises(ActorLost, match="does not answer"):
            policy.status().result(30)
    finally:
        if not is_killed:
            os.kill(launcher.pid, signal.SIGCONT)
        launcher.stdin.close()
        launcher.wait(30)
        launcher.stdout.close()


def test_a_long_command_gives_signs_of_life(
    run: DeploymentHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.served_fakes import engines_of

    monkeypatch.setattr(control_socket, "_SIGN_OF_LIFE_S", 0.2)
    monkeypatch.setattr(control_socket, "_SILENCE_S", 1.0)
    policy = rollout.connect(run_folder(run))["policy"]
    with engines_of(run["policy"]) as engines:
        engine = next(iter(engines.values()))
        engine.hold("pause_generation")
        pending = policy.phases.pause_generation()
        engine.wait_entered("pause_generation")
        with pytest.raises(TimeoutError):
            pending.result(2.5)  # longer than a silence would be accepted
        engine.open("pause_generation")
        assert pending.result(30).phase_s
