"""Adapters pushed over a base that stays: to all engines, through releases, and after a crash."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.protocol import SamplingParams
from rollout import RolloutConfig, launch
from rollout.core.errors import WeightMismatch
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.tensors import bytes_fingerprint
from rollout.weights.tensors.adapters import merged
from tests.support.engine_keys import client_of
from tests.support.lora import split_by_adapter
from tests.support.processes import wait_until

pytestmark = [pytest.mark.embedded, pytest.mark.slow]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


@pytest.fixture(scope="module")
def base(model_path: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(model_path)
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.fixture(scope="module")
def deployment(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle]:
    options = {"enable-lora": True, "max-lora-rank": 8}
    config = {
        "log_dir": str(tmp_path_factory.mktemp("logs")),
        "servers": {
            "policy": {
                "model_path": str(model_path),
                "weights": {"update": "lora"},
                "groups": {"main": {"engine": {"kind": "embedded", "options": options}}},
                "health": {"probe_interval_s": 0.2, "backoff_s": 0.1},
            }
        },
    }
    with launch(RolloutConfig.from_dict(config), backend="local") as deployment:
        yield deployment


def adapter(base: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    named = {}
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        rows, columns = base[f"{layer}.weight"].shape
        for half, shape in (("A", (4, columns)), ("B", (rows, 4))):
            name = f"base_model.model.{layer}.lora_{half}.weight"
            named[name] = torch.randn(shape, generator=make)
    return named


def engine_of(policy: ServerHandle) -> Any:
    return policy.status().result().groups[0].engines[0]


async def held(policy: ServerHandle) -> tuple[dict[str, str], dict[str, str]]:
    """Fingerprints of base and adapter, by the engine's own word."""
    client = client_of(engine_of(policy))
    tensors = (await client.weights_checker()).tensors[0]
    await client.aclose()
    return split_by_adapter(tensors)


def prints(named: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: bytes_fingerprint(name, one) for name, one in named.items()}


async def say(policy: ServerHandle, lora_path: str | None) -> list[int]:
    import httpx

    body = {"input_ids": PROMPT, "sampling_params": GREEDY.to_wire(), "lora_path": lora_path}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{policy.url}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["output_ids"]
    return ids


async def test_an_adapter_is_pushed_over_a_base_that_comes_back_from_the_release(
    deployment: DeploymentHandle, base: dict[str, torch.Tensor]
) -> None:
    policy = deployment["policy"]
    assert not policy.checks.base_differs(base)
    for seed in (1, 2):
        named = adapter(base, seed)
        async with policy.offloaded() as window:
            window.push(named, adapter=CONFIG)
        of_base, of_adapter = await held(policy)
        assert of_base == prints({name: base[name] for name in of_base})
        assert of_adapter == prints(named)
        assert engine_of(policy).weight_version == 0  # of the base
    assert await say(policy, "policy") != await say(policy, None)


async def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_serves(
    deployment: DeploymentHandle, base: dict[str, torch.Tensor]
) -> None:
    policy = deployment["policy"]
    before = await held(policy)
    named = adapter(base, 3)
    first = next(iter(named))
    for wrong, config, words in (
        ({**named, first: named[first][:, 1:].clone()}, CONFIG, "but 'model.layers.0"),
        ({**named, first.replace("layers.0", "layers.9"): named[first]}, CONFIG, "no layer"),
        (named, {**CONFIG, "r": 5}, "has not rank 5"),
    ):
        with pytest.raises(WeightMismatch, match=words):
            policy.phases.make_push(wrong, adapter=config)
    assert await held(policy) == before


async def test_an_adapter_of_other_tensors_replaces_the_one_before_and_no_engine_ends(
    deployment: DeploymentHandle, base: dict[str, torch.Tensor]
) -> None:
    policy = deployment["policy"]
    both = adapter(base, 7)
    fewer = {name: one for name, one in both.items() if "q_proj" in name}
    renamed = {name.replace("layers.0", "layers.1"): one for name, one in fewer.items()}
    pid = engine_of(policy).pid
    for named in (both, fewer, renamed, both):
        async with policy.offloaded() as window:
            window.push(named, adapter=CONFIG)
        assert (await held(policy))[1] == prints(named)
        assert engine_of(policy).weight_version == 0  # of the base
    assert (engine_of(policy).pid, engine_of(policy).fence_reason) == (pid, "")


async def test_pefts_own_config_is_taken_and_one_with_a_wrong_field_reaches_no_engine(
    deployment: DeploymentHandle, base: dict[str, torch.Tensor]
) -> None:
    peft = pytest.importorskip("peft")
    policy = deployment["policy"]
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}
    config = peft.LoraConfig(**settings, task_type="CAUSAL_LM").to_dict()
    assert isinstance(config["target_modules"], set)
    await policy.push(policy.phases.make_push(adapter(base, 8), adapter=config))
    assert (await held(policy))[1] == prints(adapter(base, 8))
    pid, version = engine_of(policy).pid, policy.weight_version
    for more, words in (
        ({"use_dora": True}, "use_dora = True is not supported by any engine"),
        ({"modules_to_save": {"lm_head"}}, "modules_to_save = {'lm_head'} is not supported"),
    ):
        with pytest.raises(WeightMismatch, match=words):
            policy.phases.make_push(adapter(base, 9), adapter=config | more)
    assert (engine_of(policy).pid, policy.weight_version) == (pid, version)
    assert (await held(policy))[1] == prints(adapter(base, 8))


@pytest.mark.timeout(180)
async def test_an_engine_that_is_killed_comes_back_with_base_and_adapter_without_a_push(
    deployment: DeploymentHandle, base: dict[str, torch.Tensor]
) -> None:
    policy = deployment["policy"]
    await policy.push(policy.phases.make_push(adapter(base, 4), adapter=CONFIG))
    said = await say(policy, "policy")
    killed, before = engine_of(policy), engine_of(policy).weight_version
    os.killpg(killed.pid, signal.SIGKILL)

    def is_back() -> bool:
        engine = engine_of(policy)
        return (
            engine.pid != killed.pid
            and not engine.is_stale
            and not engine.fence_reason
            and engine.weight_version == before
        )

    assert wait_until(is_back, 120), policy.status().result()
    assert (await held(policy))[1] == prints(adapter(base, 4))
    assert await say(policy, "policy") == said


async def test_base_and_adapter_merged_say_what_the_adapter_says(
    deployment: DeploymentHandle, base: dict[str, torch.Tensor]
) -> None:
    policy = deployment["policy"]
    named = adapter(base, 5)
    await policy.push(policy.phases.make_push(named, adapter=CONFIG))
    said = await say(policy, "policy")
    whole = dict(merged(base, named, CONFIG))
    await policy.push(policy.phases.make_push(whole, is_base=True))
    assert await say(policy, None) == said
    assert policy.checks.base_differs(whole)


async def test_a_trainers_base_that_is_not_the_one_on_disk_is_pushed(
    deployment: DeploymentHandle, base: dict[str, torch.Tensor]
) -> None:
    policy = deployment["policy"]
    other = {name: value + 0.01 for name, value in base.items()}
    assert policy.checks.base_differs(other)
    await policy.push(policy.phases.make_push(other, is_base=True))
    of_base, _ = await held(policy)
    assert of_base == prints({name: other[name] for name in of_base})
    named = adapter(base, 6)
    async with policy.offloaded() as window:
        window.push(named, adapter=CONFIG)
    assert await held(policy) == (of_base, prints(named))
