"""What an abort ends over embedded engines, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

import rollout
from rollout.runtime.handle import ServerHandle
from rollout.testing.tiny_model import make_tiny_model
from tests.support import abort_story

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


@pytest.fixture(scope="module")
def policy(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    group = {"num_engines": 2, "engine": {"kind": "embedded", "cpus": 0.5}}
    server = {"model_path": str(model_path), "groups": {"main": group}}
    config = {"log_dir": str(tmp_path_factory.mktemp("run")), "servers": {"policy": server}}
    with rollout.launch(rollout.RolloutConfig.from_dict(config)) as deployment:
        yield deployment["policy"]


def test_an_abort_ends_the_replies_of_its_call_and_no_others(policy: ServerHandle) -> None:
    abort_story.check_aborts_of_calls(policy)


def test_an_abort_ends_the_request_of_its_id_and_no_other(
    policy: ServerHandle, model_path: Path
) -> None:
    weights = load_file(model_path / "model.safetensors")
    abort_story.check_aborts_of_ids(policy, weights, 1)


def test_an_abort_ends_several_completions(policy: ServerHandle) -> None:
    abort_story.check_an_abort_of_several_completions(policy)
