"""A model whose head is tied to its embedding, on real engines of two pipeline stages: the head is
in the last stage, the embedding in the first, and a push of the embedding reaches both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import rollout
from rollout.config import RolloutConfig
from rollout.core.errors import ConfigError, PhaseFailed, WeightMismatch
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from rollout.runtime.local import launch_local
from rollout.testing.tiny_model import make_tiny_model
from tests.engines.embedded import reference
from tests.support import random_deltas
from tests.support.kinds import not_for
from tests.support.models import FOR_VLLM
from tests.support.real_policy import TWO_STAGES, one_engine

pytestmark = pytest.mark.timeout(900)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROMPT = list(b"Once upon a time")
GREEDY = rollout.SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
ROUNDING, FAR = 1e-3, 1.0
"""Nats, of any token: at most between two that are the same, and at least of another model."""
FORMS = {"without": "qwen3", "with": "qwen2"}
"""Without the head in the checkpoint's files, as transformers saves such a model, and with it."""
TWO_FORMS = pytest.mark.parametrize("name", FORMS)
Weights = dict[str, list[Path]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tied-stages")


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    """Three models of each form, as transformers saves them."""
    shape: dict[str, Any] = {"tie_embeddings": True, **FOR_VLLM}
    return {
        name: [make_tiny_model(folder / name / str(seed), kind, seed, **shape) for seed in range(3)]
        for name, kind in FORMS.items()
    }


def tensors_of(model: Path, name: str = "without") -> dict[str, Any]:
    """What a trainer pushes; with a head, as a tensor of its own."""
    tensors = load_file(model / "model.safetensors")
    return {HEAD: tensors[EMBEDDING].clone(), **tensors} if name == "with" else tensors


@pytest.fixture(scope="module")
def deployment(kind: str, folder: Path, weights: Weights) -> Iterator[DeploymentHandle]:
    """Small buckets, so that embedding and head are in different ones."""
    first = weights["with"][0]
    paths = {"without": weights["without"][0], "with": shutil.copytree(first, folder / "started")}
    file = paths["with"] / "model.safetensors"
    save_file(tensors_of(first, "with"), file, metadata={"format": "pt"})
    engine = TWO_STAGES[kind]
    if kind == "vllm":
        engine = {
            "options": engine["options"] | {"worker-cls": "tests.support.vllm_old_head.Keeping"},
            "env": engine["env"] | {"ROLLOUT_TEST_KEEPS_HEAD": str(folder / "keep")},
        }
    servers = {
        name: {
            "model_path": str(path),
            "groups": {"main": one_engine(kind, **engine)},
            "weights": {"bucket_bytes": 100_000},
            "health": {"recover": False},
        }
        for name, path in paths.items()
    }
    config = {"log_dir": str(folder / "logs"), "servers": servers}
    with launch_local(RolloutConfig.from_dict(config)) as launched:
        yield launched


def by_route(handle: ServerHandle, folder: Path, route: str) -> ServerHandle:
    """The same server, pushed to by this route."""
    settings = {"transport": route, "disk_path": str(folder / "pushed-{version}")}
    return random_deltas.pushed_by_deltas(handle, encoding="full", **settings)


def distance(handle: ServerHandle, model: Path) -> float:
    """How far a log-prob of its greedy answer is from the model's, at most."""
    reply = handle.generate(PROMPT, GREEDY).result(60)
    exact = reference.logprobs(model, PROMPT, list(reply.output_ids), 1.0)
    assert len(exact) == GREEDY.max_new_tokens
    return max(abs(one - other) for one, other in zip(reply.output_logprobs, exact, strict=True))


@pytest.mark.parametrize("route", ["auto", "by_value", "disk"])
@TWO_FORMS
def test_the_last_stage_computes_with_the_pushed_embedding(
    deployment: DeploymentHandle, weights: Weights, folder: Path, name: str, route: str
) -> None:
    handle = by_route(deployment[name], folder, route)
    first, *others = weights[name]
    for model in [*others, first]:
        handle.push(tensors_of(model, name)).result(120)
        found = {path: distance(handle, path) for path in weights[name]}
        assert found.pop(model) < ROUNDING
        assert min(found.values()) > FAR


def test_a_head_that_the_checkpoint_does_not_have_is_left_out_or_refused(
    deployment: DeploymentHandle, weights: Weights
) -> None:
    """The trainer's module has both names for one tensor."""
    _, model, other = weights["without"]
    handle, tensors = deployment["without"], tensors_of(model)
    handle.push({HEAD: tensors[EMBEDDING], **tensors}).result(120)
    assert distance(handle, model) < ROUNDING
    with pytest.raises(WeightMismatch, match=f"ties the head to '{EMBEDDING}'.* leave '{HEAD}'"):
        handle.push(tensors_of(other, "with")).result(120)
    assert distance(handle, model) < ROUNDING


def test_deltas_are_refused_in_words_and_auto_sends_whole_tensors(
    deployment: DeploymentHandle, weights: Weights
) -> None:
    handle, (_, *models) = deployment["without"], weights["without"]
    with pytest.raises(ConfigError, match=r"= delta: .* applies whole tensors only"):
        random_deltas.pushed_by_deltas(handle).push(tensors_of(models[0])).result(120)
    by_auto = random_deltas.pushed_by_deltas(handle, encoding="auto")
    for model in models:
        report = by_auto.push(tensors_of(model)).result(120)
        assert random_deltas.sent(report).route == "by_value"
        assert distance(handle, model) < ROUNDING


@not_for("sglang")
@TWO_FORMS
def test_a_last_stage_that_keeps_its_old_head_is_not_verified(
    deployment: DeploymentHandle, weights: Weights, folder: Path, name: str
) -> None:
    """In a group of one engine, where no other one has the right head."""
    handle, (_, model, other) = deployment[name], weights[name]
    handle.push(tensors_of(model, name)).result(120)
    (folder / "keep").touch()
    kept = HEAD if name == "with" else EMBEDDING
    with pytest.raises(PhaseFailed, match=f"'{kept}' is not what the trainer sent"):
        handle.push(tensors_of(other, name)).result(120)
    (folder / "keep").unlink()
    assert handle.status().result(30).gate == "closed"
