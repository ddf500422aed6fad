"""Real vLLM with two tensor-parallel workers, with a model that it renames, and a quantised one.

All have tensors under names or shapes of vLLM's own: the checkpoint alone says what a push has.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import rollout
from rollout.config import RolloutConfig
from rollout.core.errors import ConfigError, WeightMismatch
from rollout.core.types import EngineStatus
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from rollout.runtime.local import launch_local
from tests.engines.embedded import reference
from tests.support import random_deltas
from tests.support.contract import PROMPT
from tests.support.engine_keys import Keys
from tests.support.models import FOR_VLLM, plain_models
from tests.support.real_policy import TWO_WORKERS, one_engine
from tests.support.real_vllm import write_buckets

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

GREEDY = rollout.SamplingParams(max_new_tokens=8, temperature=0.0)
HALF = "model.decoder.layers.0.self_attn.k_proj.weight"
JOINED = "model.decoder.layers.0.self_attn.qkv_proj"
Models = dict[str, list[Path]]


def make_opt(path: Path, seed: int, tokenizer: Path) -> Path:
    """vLLM has this model's tensors with other prefixes (``hf_to_vllm_mapper``)."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "vocab_size": 259}
    special = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258}
    config = OPTConfig(**shape, **special, num_hidden_layers=2, num_attention_heads=2, init_std=0.2)
    OPTForCausalLM(config).save_pretrained(path)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, path)
    return path


def quantised(name: str, tensor: Any) -> list[tuple[str, Any]]:
    """A trainer's tensor as the checkpoint has it: float8 with a scale for each row."""
    import torch

    if not name.endswith("_proj.weight"):
        return [(name, tensor)]
    scale = tensor.abs().amax(1, keepdim=True) / 448
    return [(name, (tensor / scale).to(torch.float8_e4m3fn)), (f"{name}_scale", scale)]


def make_quantised(path: Path, plain: Path) -> Path:
    """In the format of compressed-tensors.  vLLM's int8 layers on a CPU take no pushes."""
    from safetensors.torch import save_file

    shutil.copytree(plain, path)
    tensors = dict(pair for one in tensors_of(plain).items() for pair in quantised(*one))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    of_all = {"num_bits": 8, "type": "float", "symmetric": True}
    layers = {
        "targets": ["Linear"],
        "weights": {**of_all, "strategy": "channel", "dynamic": False},
        "input_activations": {**of_all, "strategy": "token", "dynamic": True},
    }
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": layers},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    plain = plain_models(root, 2, **FOR_VLLM)
    return {
        "parallel": plain,
        "renamed": [make_opt(root / f"opt-{seed}", seed, plain[0]) for seed in range(2)],
        "quantised": [make_quantised(root / "quantised", plain[0]), *plain],
    }


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def deployment(models: Models, logs: Path) -> Iterator[DeploymentHandle]:
    groups: dict[str, Any] = {
        "parallel": one_engine("vllm", **TWO_WORKERS),
        "renamed": one_engine("vllm", options={"max-model-len": 1024}),
        "quantised": one_engine("vllm", options={"max-model-len": 1024}),
    }
    servers = {
        name: {
            "model_path": str(models[name][0]),
            "groups": {"main": group},
        }
        for name, group in groups.items()
    }
    config = {"log_dir": str(logs), "servers": servers}
    with launch_local(RolloutConfig.from_dict(config)) as launched:
        yield launched


def tensors_of(model: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def push(deployment: DeploymentHandle, name: str, tensors: Any, **more: Any) -> int:
    handle, version = deployment[name], deployment[name].weight_version + 1
    with handle.offloaded() as window:
        window.push(tensors, version=version, **more)
    return version


def check_serves(handle: ServerHandle, model: Path, version: int) -> None:
    reply = handle.generate(list(PROMPT), GREEDY).result(60)
    assert list(reply.output_ids) == reference.greedy(model, list(PROMPT), max_new_tokens=8)
    assert {span.version for span in reply.weight_versions} == {str(version)}


def engine_of(handle: ServerHandle) -> EngineStatus:
    (engine,) = [one for group in handle.status().result(30).groups for one in group.engines]
    return engine


def fingerprints(handle: ServerHandle) -> list[dict[str, str]]:
    """Those of each worker."""
    body = {"method": "rollout_fingerprints"}
    engine = engine_of(handle)
    url = f"{engine.endpoint.url}/collective_rpc"
    answer = httpx.post(url, json=body, timeout=60, auth=Keys(engine))
    return [one["checksums"] for one in answer.raise_for_status().json()["results"]]


@pytest.mark.parametrize("name", ["parallel", "renamed"])
def test_a_push_under_the_checkpoints_names_is_served(
    deployment: DeploymentHandle, models: Models, name: str
) -> None:
    handle, seen = deployment[name], []
    for model in [models[name][1], models[name][0], models[name][1]]:
        version = push(deployment, name, tensors_of(model))
        check_serves(handle, model, version)
        seen.append(fingerprints(handle))
    assert len(seen[0]) == (2 if name == "parallel" else 1)
    assert seen[0] == seen[2]
    for worker, other in zip(seen[0], seen[1], strict=True):
        matrices = {one for one in worker if "qkv_proj.weight" in one or "embed_tokens" in one}
        assert matrices
        assert not [one for one in matrices if worker[one] == other[one]]
    if name == "parallel":  # each has its own half of a layer
        first, second = seen[0]
        assert first != second


def test_what_is_pushed_quantised_is_computed_with(
    deployment: DeploymentHandle, models: Models
) -> None:
    """What a start from the checkpoint computes with, and near to what the trainer has."""
    handle, (_, first, second) = deployment["quantised"], models["quantised"]
    started = handle.generate(list(PROMPT), GREEDY).result(60)
    for model, other in [(second, first), (first, second)]:
        version = push(deployment, "quantised", tensors_of(model), name_map=quantised)
        reply = handle.generate(list(PROMPT), GREEDY).result(60)
        assert {span.version for span in reply.weight_versions} == {str(version)}
        assert distance(reply, model) < 0.3
        assert distance(reply, other) > 1
    assert reply.output_ids == started.output_ids
    assert reply.output_logprobs == pytest.approx(started.output_logprobs, abs=1e-5)


def distance(reply: Any, model: Path) -> float:
    """How far its log-probs are from the model's, on average."""
    exact = reference.logprobs(model, list(PROMPT), list(reply.output_ids), 1.0)
    pairs = zip(reply.output_logprobs, exact, strict=True)
    return sum(abs(one - other) for one, other in pairs) / len(exact)


@pytest.mark.parametrize("name", ["parallel", "renamed"])
def test_a_push_that_does_not_fit_the_checkpoint_is_refused(
    deployment: DeploymentHandle, models: Models, name: str
) -> None:
    handle, tensors = deployment[name], tensors_of(models[name][1])
    first, *_, last = tensors
    with pytest.raises(WeightMismatch, match=f"tensor '{last}' has shape .* the model's is"):
        handle.phases.make_push({**tensors, last: tensors[last][:3]})
    with pytest.raises(WeightMismatch, match="the model has no tensor 'extra'"):
        handle.phases.make_push({**tensors, "extra": tensors[last].clone()})
    with pytest.raises(WeightMismatch, match=f"first '{first}'"):
        handle.phases.make_push({one: tensors[one] for one in tensors if one != first})


def test_a_part_of_a_joined_layer_is_refused_though_its_names_are_vllms(
    deployment: DeploymentHandle, models: Models, logs: Path, tmp_path: Path
) -> None:
    handle, (old, new) = deployment["renamed"], models["renamed"]
    push(deployment, "renamed", tensors_of(old))
    (before,) = fingerprints(handle)
    [folder] = write_buckets(new, tmp_path, 1, [HALF])
    bodies = {
        "/start_weight_update": {},
        "/update_weights": {"update_info": {"path": str(folder)}},
        "/finish_weight_update": {"weight_version": "99"},
    }
    engine = engine_of(handle)
    with httpx.Client(base_url=engine.endpoint.url, timeout=60, auth=Keys(engine)) as http:
        answers = [http.post(path, json=body).status_code for path, body in bodies.items()]
    assert answers == [200, 200, 500]
    (log,) = (log for log in logs.rglob("main-0.log") if log.parent.name == "renamed")
    assert f"a part of layer {JOINED} was not pushed; push the whole layer" in log.read_text()
    (after,) = fingerprints(handle)
    changed = {name for name, text in after.items() if text != before[name]}
    assert f"{JOINED.replace('.0.', '.1.')}.weight" in changed
    assert f"{JOINED}.weight" not in changed
    version = push(deployment, "renamed", tensors_of(new))
    check_serves(handle, new, version)


@pytest.mark.parametrize("name", ["parallel", "renamed", "quantised"])
def test_an_engine_with_names_of_its_own_gets_whole_tensors_and_a_delta_is_refused(
    deployment: DeploymentHandle, models: Models, name: str
) -> None:
    more: Any = {"name_map": quantised} if name == "quantised" else {}
    tensors = tensors_of(models[name][1])
    with pytest.raises(ConfigError, match=r"= delta: .* applies whole tensors only"):
        random_deltas.pushed_by_deltas(deployment[name]).push(tensors, **more).result(120)
    by_auto = random_deltas.pushed_by_deltas(deployment[name], encoding="auto")
    for _ in range(2):
        report = by_auto.push(tensors, **more).result(120)
        assert random_deltas.sent(report).route == "by_value"
        tensors = random_deltas.changed(tensors, 0.02)
