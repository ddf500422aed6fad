"""Every kind of engine computes what transformers computes of the trainer's own tensors: of each
layout, type and name map, over each route, and after an offload without another push."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from engines.protocol import SamplingParams
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.tensors import NameMap
from tests.support.push_settings import with_settings
from tests.support.real_policy import one_engine, real_config

pytestmark = pytest.mark.timeout(900)
PROMPT = [11, 12, 13, 14]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
NATS = 1e-3
"""Between two implementations in float32."""
Tensors = dict[str, Any]

ROUTES: dict[str, dict[str, Any]] = {
    "shared_memory": {"transport": "shared_memory"},
    "shared_memory, streamed": {"transport": "shared_memory", "stream": True},
    "by_value": {"transport": "by_value"},
    "disk": {"transport": "disk"},
    "distributed": {"transport": "distributed", "backend": "gloo"},
    "delta": {"transport": "shared_memory", "encoding": "delta"},
}
NOT_OF_KIND = {("sglang", "delta"): "it applies whole tensors only"}


def turned(values: Any) -> Any:
    return values.movedim(0, -1).contiguous().movedim(-1, 0)


def every_second(values: Any) -> Any:
    return values.repeat_interleave(2, dim=-1)[..., ::2]


def in_the_middle(values: Any) -> Any:
    """A view that begins at an odd element of larger memory."""
    flat = torch.zeros(values.numel() + 8, dtype=values.dtype)
    inner = flat[3 : 3 + values.numel()].view(values.shape)
    inner.copy_(values)
    return inner


LAYOUTS: tuple[Callable[[Any], Any], ...] = (
    turned,
    every_second,
    in_the_middle,
    torch.nn.Parameter,
)


def in_layouts(tensors: Tensors, first: int = 0) -> Tensors:
    """Each tensor in one of the layouts, from the ``first`` on in turn."""
    return {
        name: LAYOUTS[(first + index) % len(LAYOUTS)](tensor)
        for index, (name, tensor) in enumerate(tensors.items())
    }


def as_given(tensors: Tensors, push: int) -> tuple[Tensors, NameMap | None, Tensors]:
    return in_layouts(tensors, push), None, tensors


def of_other_types(tensors: Tensors, push: int) -> tuple[Tensors, NameMap | None, Tensors]:
    """Wider and narrower ones than the model's float32, cast as ``weights.casts`` allows."""
    types = torch.bfloat16, torch.float64, torch.float16, torch.float32
    cast = {
        name: tensor.to(types[index % len(types)])
        for index, (name, tensor) in enumerate(tensors.items())
    }
    return in_layouts(cast, push), None, {name: one.float() for name, one in cast.items()}


def fused(tensors: Tensors, push: int) -> tuple[Tensors, NameMap | None, Tensors]:
    """Names of the trainer's own, and the two halves of each gate in one turned matrix."""
    given: Tensors = {}
    for name, tensor in in_layouts(tensors, push).items():
        if name.endswith("gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            given[f"own.{name}"] = torch.cat([tensors[name], up]).t().contiguous().t()
        elif "up_proj" not in name:
            given[f"own.{name}"] = tensor

    def name_map(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        name = name.removeprefix("own.")
        if name.endswith("gate_proj.weight"):
            gate, up = tensor.chunk(2)
            yield name, gate
            yield name.replace("gate_proj", "up_proj"), up
        else:
            yield name, tensor

    return given, name_map, tensors


FORMS = (as_given, of_other_types, fused)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("embedded", marks=[pytest.mark.embedded, pytest.mark.slow]),
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(kind: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    shape = {"hidden_size": 128} if kind == "vllm" else {}
    return [make_tiny_model(folder / str(seed), seed=seed, **shape) for seed in range(4)]


@pytest.fixture(scope="module")
def deployment(
    kind: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle]:
    groups = {"main": one_engine(kind)}
    logs = tmp_path_factory.mktemp("logs")
    weights = {"casts": "any", "store": {"spare_bytes": 0}}
    config = real_config(models[0], logs, groups, weights=weights)
    with launch_local(config) as deployment:
        yield deployment


def gap(tensors: Mapping[str, Any], model_path: Path, reply: Any) -> float:
    """The largest distance of a log-prob from that of transformers with these tensors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.load_state_dict(dict(tensors), strict=False)
    ids = list(reply.output_ids)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([[*PROMPT, *ids]])).logits[0, len(PROMPT) - 1 : -1]
    truth = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert logits.argmax(-1).tolist() == ids
    return float((truth - torch.tensor(reply.output_logprobs)).abs().max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("route", ROUTES)
def test_an_engine_computes_what_transformers_does(
    kind: str,
    route: str,
    form: Any,
    deployment: DeploymentHandle,
    models: list[Path],
    tmp_path: Path,
) -> None:
    if why := NOT_OF_KIND.get((kind, route)):
        pytest.skip(why)
    policy = deployment["policy"]
    version = policy.status().result(30).weight_version + 1
    model_path = models[version % len(models)]
    tensors, name_map, wanted = form(load_file(model_path / "model.safetensors"), version)
    settings = {"disk_path": str(tmp_path / "{version}"), **ROUTES[route]}
    pushed = with_settings(deployment, tmp_path, **settings)
    try:
        pushed.push(tensors, version, name_map=name_map).result(300)
    finally:
        pushed.close()
    reply = policy.generate(PROMPT, GREEDY).result(60)
    assert {span.version for span in reply.weight_versions} == {str(version)}
    assert gap(wanted, model_path, reply) < NATS


def test_what_was_pushed_serves_again_after_an_offload(
    deployment: DeploymentHandle, models: list[Path]
) -> None:
    policy = deployment["policy"]
    version = policy.status().result(30).weight_version + 1
    model_path = models[version % len(models)]
    tensors = load_file(model_path / "model.safetensors")
    policy.push(tensors, version).result(300)
    for _ in range(2):  # at once: the store may still write it
        policy.offload().result(120)
        assert policy.serve().result(120).weight_version == version
        reply = policy.generate(PROMPT, GREEDY).result(60)
        assert {span.version for span in reply.weight_versions} == {str(version)}
        assert gap(tensors, model_path, reply) < NATS
