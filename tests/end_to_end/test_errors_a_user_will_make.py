"""Each mistake gives one clear message and a status that is not 0, and leaves nothing running."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rollout
from rollout.runtime.handle import ServerHandle
from tests.support.builders import with_kinds
from tests.support.processes import ROOT, program, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout.testing.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def config(tmp_path: Path, model: str, *, server: dict | None = None, **group: object) -> str:
    group = with_kinds({"main": group})["main"]
    values = {
        "log_dir": str(tmp_path / "logs"),
        "servers": {"policy": {"model_path": model, "groups": {"main": group}, **(server or {})}},
    }
    path = tmp_path / "rollout.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def fake_checkpoint(tmp_path: Path) -> str:
    """A directory that passes for a checkpoint until somebody loads it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    return str(tmp_path / "model")


def refused(*arguments: str, status: int) -> str:
    """Run the command; its one message, after checking how it ended."""
    with program("-m", "rollout", *arguments) as command:
        assert command.finish(100) == status, command.output
        assert "Traceback" not in command.output
        assert wait_until(lambda: not command.descendants(), 20), command.descendants()
        return command.output


def test_a_wrong_key_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    said = refused("validate", config(tmp_path, "m", num_engine=2), status=2)
    assert "unknown key 'num_engine' in servers.policy.groups.main" in said
    assert "did you mean 'num_engines'?" in said


@pytest.mark.slow
def test_a_missing_model_directory_is_named(tmp_path: Path) -> None:
    said = refused("serve", config(tmp_path, str(tmp_path / "nowhere")), status=2)
    assert f"servers.policy.model_path: there is no directory '{tmp_path}/nowhere'" in said


@pytest.mark.torch
def test_a_taken_router_port_is_named_before_any_engine_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = config(tmp_path, fake_checkpoint(tmp_path), server={"router": {"port": port}})
        said = refused("serve", path, status=2)
    assert f"127.0.0.1:{port}" in said or str(port) in said
    assert not list(tmp_path.glob("logs/**/*.log")), "no engine has written a log"


@pytest.mark.slow
@pytest.mark.torch
def test_too_few_gpus_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    path = config(tmp_path, fake_checkpoint(tmp_path), num_engines=16, engine={"gpus": 1})
    said = refused("serve", path, status=1)
    assert "placement needs 16 GPUs, this machine has 2" in said


@pytest.mark.slow
@pytest.mark.ray
def test_too_few_cpus_in_the_cluster_are_counted_at_once(tmp_path: Path) -> None:
    path = config(tmp_path, fake_checkpoint(tmp_path), num_engines=500)
    said = refused("serve", path, "--backend", "ray", status=1)
    assert "placement needs 500 CPUs, the cluster has" in said


@pytest.mark.slow
@pytest.mark.embedded
def test_an_engine_that_dies_while_starting_shows_the_end_of_its_log(tmp_path: Path) -> None:
    said = refused("serve", config(tmp_path, fake_checkpoint(tmp_path), num_engines=2), status=1)
    assert "engine main-" in said
    assert "exited with status" in said
    assert "engines.embedded: cannot serve" in said


@pytest.mark.slow
def test_an_option_the_library_sets_itself_is_refused_by_name(tmp_path: Path) -> None:
    path = config(tmp_path, fake_checkpoint(tmp_path), engine={"options": {"port": 1}})
    said = refused("serve", path, status=2)
    assert "options that cannot be set here: port (chosen at launch)" in said


def test_without_ray_the_ray_back_end_says_how_to_install_it(tmp_path: Path) -> None:
    blocker = tmp_path / "blocked"
    blocker.mkdir()
    (blocker / "ray.py").write_text("raise ModuleNotFoundError('No module named ray', name='ray')")
    path = config(tmp_path, fake_checkpoint(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "rollout", "serve", path, "--backend", "ray"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(blocker)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "pip install 'ray[default]>=2.50'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def weights(tiny_model: Path) -> Any:
    return pytest.importorskip("safetensors.torch").load_file(tiny_model / "model.safetensors")


@pytest.fixture(scope="module")
def policy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    folder = tmp_path_factory.mktemp("push")
    loaded = rollout.RolloutConfig.from_file(config(folder, str(tiny_model)))
    with rollout.launch(loaded, backend="local") as deployment:
        yield deployment["policy"]


def mistyped(weights: dict[str, Any]) -> None:
    weights["model.norm.weights"] = weights.pop("model.norm.weight")


def cut(weights: dict[str, Any]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"][:3]


def left_out(weights: dict[str, Any]) -> None:
    del weights["model.norm.weight"]


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            mistyped,
            "the model has no tensor 'model.norm.weights'; did you mean 'model.norm.weight'?",
        ),
        (cut, "tensor 'model.norm.weight' has shape [3], the model's is [64]"),
        (left_out, "the push lacks 1 of 21 tensors, first 'model.norm.weight'"),
    ],
)
def test_a_push_that_does_not_fit_is_refused_and_the_next_one_goes_through(
    change: Callable[[dict[str, Any]], None], message: str, policy: ServerHandle, weights: Any
) -> None:
    changed = dict(weights)
    change(changed)
    policy.offload().result(60)
    policy.phases.onload_weights().result(60)
    with pytest.raises(rollout.WeightMismatch, match=re.escape(message)):
        policy.phases.update_weights(changed).result(60)
    # Nothing was sent, so the right push still goes through.
    policy.push(weights).result(60)
    assert policy.status().result(30).phase == "serving"
