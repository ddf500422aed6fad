"""A real SGLang engine whose weights only a log-prob check can verify."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import rollout
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.support.engine_keys import Keys
from tests.support.real_policy import one_engine, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


@contextmanager
def serving(model: Path, folder: Path, **server: Any) -> Iterator[ServerHandle]:
    """One engine of its own, which may be fenced."""
    config = real_config(model, folder, {"main": one_engine()}, health={"recover": False}, **server)
    with launch_local(config) as deployment:
        yield deployment["policy"]


@pytest.fixture
def frozen(models: list[Path], tmp_path: Path) -> Iterator[ServerHandle]:
    how = {"verify": {"by": "canary"}, "weights": {"update": "frozen"}}
    with serving(models[0], tmp_path, **how) as policy:
        yield policy


def step(policy: ServerHandle, *, lose: bool = False) -> None:
    policy.offload().result(120)
    policy.phases.onload_weights().result(120)
    if lose:
        (engine,) = policy.status().result(30).groups[0].engines
        reset(engine)
    policy.phases.verify().result(120)
    policy.phases.onload_kv().result(120)
    policy.phases.continue_generation().result(120)


def reset(engine: EngineStatus) -> None:
    """What a release without a backup would leave."""
    body = {"action": "reset_tensors"}
    url = f"{engine.endpoint.url}/weights_checker"
    reply = httpx.post(url, json=body, timeout=60, trust_env=False, auth=Keys(engine))
    assert reply.status_code == 200


def generate(policy: ServerHandle) -> httpx.Response:
    body = {"input_ids": [60, 61, 62], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    return httpx.post(f"{policy.url}/generate", json=body, timeout=60, trust_env=False)


def test_a_canary_passes_what_came_back_whole_and_fences_what_did_not(
    frozen: ServerHandle,
) -> None:
    policy = frozen
    before = generate(policy).json()["output_ids"]
    for _ in range(2):
        step(policy)
        assert policy.status().result(30).gate == "open"
        assert generate(policy).json()["output_ids"] == before
    with pytest.raises(
        rollout.PhaseFailed, match=r"canary prompt \d, token \d+ has log-prob"
    ) as no:
        step(policy, lose=True)
    assert no.value.phase == "continue_generation"
    status = policy.status().result(30)
    (engine,) = status.groups[0].engines
    assert (status.gate, engine.state) == ("closed", "fenced")
    assert "when the weights were the same" in engine.fence_reason
    assert generate(policy).status_code == 503


def test_an_engine_is_held_against_the_trainers_own_model(
    models: list[Path], tmp_path: Path
) -> None:
    """Its fused names do not match the trainer's fingerprints, and it is the only engine."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from rollout.weights.tensors import canary_logprobs

    model: Any = AutoModelForCausalLM.from_pretrained(models[1])
    tensors = load_file(models[1] / "model.safetensors")
    with serving(models[0], tmp_path) as policy:
        told = canary_logprobs(model, policy.checks.canary_prompts)
        policy.checks.expect(told)
        policy.push(tensors).result(120)
        assert policy.status().result(30).gate == "open"
        # The next push is not what its trainer holds.
        policy.checks.expect(told)
        other = load_file(models[2] / "model.safetensors")
        with pytest.raises(rollout.PhaseFailed, match="by the trainer's own model") as failed:
            policy.push(other).result(120)
        assert failed.value.phase == "continue_generation"
