"""No engine is lost by a push whose values it could not hold: it is refused, and engines serve on.

The model is in float16, and the trainer's weights in float32, behind a name map or with stacked
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout import RolloutConfig, SamplingParams, WeightMismatch, launch
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from rollout.testing.tiny_model import make_tiny_model
from tests.support.push_settings import with_settings

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(180)]
NORM = "model.norm.weight"
EXPERTS = "model.layers.1.mlp.experts"
SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.0)
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_model(folder, architecture="qwen3_moe", dtype="float16", num_experts=4)


@pytest.fixture(scope="module")
def deployment(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    server = {
        "model_path": str(model),
        "groups": {"main": {"engine": {"kind": "embedded", "options": {"dtype": "float16"}}}},
        "health": {"recover": False},
    }
    logs = tmp_path_factory.mktemp("logs")
    config = RolloutConfig.from_dict({"log_dir": str(logs), "servers": {"policy": server}})
    with launch(config, backend="local") as deployment:
        yield deployment


@pytest.fixture
def masters(model: Path) -> Weights:
    return {name: value.float() for name, value in load_file(model / "model.safetensors").items()}


def renamed(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"model.{name}", tensor


def divided(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"model.{name}", tensor / tensor if name == "norm.weight" else tensor


def without_prefix(masters: Weights) -> Weights:
    masters = {name.removeprefix("model."): value for name, value in masters.items()}
    masters["head"] = masters.pop("lm_head.weight")
    return masters


def of_head(name_map: Any) -> Any:
    def with_head(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield from [("lm_head.weight", tensor)] if name == "head" else name_map(name, tensor)

    return with_head


def plain(masters: Weights) -> tuple[Weights, Any, str]:
    masters[NORM][3] = 1e6
    return masters, None, NORM


def behind_a_map(masters: Weights) -> tuple[Weights, Any, str]:
    masters[NORM][3] = -1e6
    return without_prefix(masters), of_head(renamed), NORM


def made_by_a_map(masters: Weights) -> tuple[Weights, Any, str]:
    masters[NORM][3] = 0.0
    return without_prefix(masters), of_head(divided), NORM


def stacked(masters: Weights) -> tuple[Weights, Any, str]:
    parts = [(f"{EXPERTS}.{n}.gate_proj.weight", f"{EXPERTS}.{n}.up_proj.weight") for n in range(4)]
    masters[parts[2][1]][1, 1] = 1e6
    joined = torch.stack([torch.cat([masters.pop(name) for name in pair]) for pair in parts])
    return {**masters, f"{EXPERTS}.gate_up_proj": joined}, None, parts[2][1]


@pytest.mark.parametrize("make", [plain, behind_a_map, made_by_a_map, stacked])
@pytest.mark.parametrize("way", ["copied", "streamed", "pusher", "by_value", "disk", "distributed"])
def test_engines_serve_on_with_their_version_after_a_push_of_what_they_could_not_hold(
    deployment: DeploymentHandle,
    masters: Weights,
    make: Callable[[Weights], tuple[Weights, Any, str]],
    way: str,
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = (
        {"transport": way} if way in ("by_value", "disk", "distributed") else {}
    )
    settings |= {"stream": way == "streamed", "disk_path": str(tmp_path / "{version}")}
    policy = with_settings(deployment, tmp_path, **settings)
    before = served(policy)
    weights, name_map, bad = make(masters)
    with pytest.raises(WeightMismatch, match=f"1 of .* values of tensor '{bad}' are NaN or inf"):
        push(policy, weights, name_map, by_pusher=way == "pusher")
    assert served(policy) == before
    policy.close()


def push(policy: ServerHandle, weights: Weights, name_map: Any, *, by_pusher: bool) -> None:
    if not by_pusher:
        policy.push(weights, name_map=name_map).result(60)
        return
    pusher = policy.pusher()
    try:
        pusher.push(weights, name_map=name_map)
    finally:
        pusher.close()


def served(policy: ServerHandle) -> tuple[Any, ...]:
    """An answer, and the state of what gave it."""
    reply = policy.generate([5, 6, 7], SAMPLING).result(60)
    status = policy.status().result()
    engines = [
        (engine.engine_id, engine.pid, engine.state, engine.weight_version)
        for engine in status.groups[0].engines
    ]
    return reply.output_ids, reply.weight_version, status.gate, status.weight_version, engines
