"""What engines compute with a pushed adapter is what PEFT computes with the trainer's."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.embedded.weights.lora_adapters import Adapters
from rollout.config import EngineKind, WeightUpdate
from rollout.core.errors import WeightMismatch
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.adapter import AsAdapter
from rollout.weights.tensors.adapters import AdapterSource, merged
from rollout.weights.tensors.payload import adapter_payload
from rollout.weights.tensors.push_plan import specs_of

pytestmark = [
    pytest.mark.embedded,
    # PEFT 0.21 asks for it, and transformers 5.24 calls it so.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
peft = pytest.importorskip("peft")

IDS = torch.tensor([[5, 17, 3, 80, 42, 9, 61]])
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8},
    "rslora": {"r": 8, "lora_alpha": 16, "use_rslora": True},
    "alphas": {"r": 4, "lora_alpha": 8, "alpha_pattern": {"o_proj": 32, r"layers\.1\..*": 4}},
    "ranks": {"r": 4, "lora_alpha": 8, "rank_pattern": {"down_proj": 8, "q_proj": 2}},
    "all": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 16},
        "alpha_pattern": {"up_proj": 4},
    },
    "one module": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
    "one half": {"r": 4, "lora_alpha": 8, "target_modules": ["up_proj", "v_proj"]},
    "some layers": {"r": 4, "lora_alpha": 8, "layers_to_transform": [1]},
    "all but": {"r": 4, "lora_alpha": 8, "exclude_modules": ["v_proj", "gate_proj"]},
    "by expression": {"r": 4, "lora_alpha": 8, "target_modules": r".*\.1\..*(q|k|v)_proj"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")
    return AutoModelForCausalLM.from_pretrained(path).eval()


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits.log_softmax(-1)
    return found


def trained(model: Any, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A model of PEFT with an adapter that changes much."""
    config = peft.LoraConfig(**{"target_modules": ALL} | settings)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = peft.get_peft_model(copy.deepcopy(model), config)
        for name, half in made.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(half, std=0.3)
                half.data = half.data.to(dtype)
    return made.eval()


def tensors_of(trainer: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(trainer)
    return found


def pushed(trainer: Any, model: Any, *kinds: EngineKind) -> tuple[WeightPush, AsAdapter]:
    base = Manifest.of(specs_of(list(model.named_parameters())))
    config = trainer.peft_config["default"].to_dict()
    source = AdapterSource(tensors_of(trainer), config, base=base, kinds=kinds)
    [(pairs, is_last)] = source.buckets(1)
    assert is_last
    assert source.manifest == Manifest.of(specs_of(pairs)), "known before anything is gathered"
    route = AsAdapter("policy", source.config)
    payload = adapter_payload(pairs)
    return WeightPush(1, source.manifest, [payload], route, contents=WeightUpdate.LORA), route


def received(push: WeightPush) -> dict[str, torch.Tensor]:
    [payload] = push.buckets
    assert isinstance(payload, bytes)
    found: dict[str, torch.Tensor] = pickle.loads(payload)
    return found


def as_sglang_reads(model: Any, push: WeightPush, config: Any) -> torch.Tensor:
    """By its rule: one rank, and ``lora_alpha / r`` for all (``srt/lora/lora.py``)."""
    served, named = copy.deepcopy(model), received(push)
    for name, up in named.items():
        if "lora_B" in name:
            down = named[name.replace("lora_B", "lora_A")]
            assert down.shape[0] == up.shape[1] == config["r"]
            layer = name.removeprefix("base_model.model.").partition(".lora_B")[0]
            assert layer.rpartition(".")[2] in config["target_modules"]
            delta = config["lora_alpha"] / config["r"] * up.float() @ down.float()
            served.get_submodule(layer).weight.data += delta
    return logprobs(served)


def as_embedded_reads(model: Any, push: WeightPush, config: Any) -> torch.Tensor:
    served = copy.deepcopy(model)
    adapters = Adapters(served, is_enabled=True, max_rank=16)
    one = adapters.load("policy", config, received(push).items())
    adapters.plan_step([(one, IDS.shape[1])])
    return logprobs(served)


@pytest.mark.parametrize("kind", [EngineKind.SGLANG, EngineKind.EMBEDDED])
@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_the_log_probs_are_those_of_peft(
    model: Any, settings: dict[str, Any], kind: EngineKind
) -> None:
    trainer = trained(model, settings)
    expected = logprobs(trainer)
    assert (expected - logprobs(model)).abs().max() > 0.1
    push, route = pushed(trainer, model, kind)
    read = as_sglang_reads if kind is EngineKind.SGLANG else as_embedded_reads
    torch.testing.assert_close(read(model, push, route.config), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_base_and_adapter_merged_are_what_peft_merges(model: Any, settings: dict[str, Any]) -> None:
    trainer = trained(model, settings)
    config = trainer.peft_config["default"].to_dict()
    found = dict(merged(dict(model.named_parameters()), tensors_of(trainer), config))
    for name, value in trainer.merge_and_unload().named_parameters():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_scale_is_moved_without_rounding(model: Any, dtype: torch.dtype) -> None:
    trainer = trained(model, CONFIGS["alphas"], dtype)
    own = tensors_of(trainer)
    push, route = pushed(trainer, model)
    assert route.config["lora_alpha"] == 4
    sent = received(push)
    for name, tensor in own.items():
        alpha = 32 if "o_proj" in name else 4 if "layers.1" in name else 8
        factor = alpha / route.config["lora_alpha"] if "lora_B" in name else 1
        assert sent[name].dtype == dtype
        assert torch.equal(sent[name].double(), tensor.double() * factor)


def test_a_value_that_leaves_the_dtype_is_refused_by_name(model: Any) -> None:
    trainer = trained(model, CONFIGS["alphas"], torch.float16)
    tensors_of(trainer)["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"].data[
        0, 0
    ] = 60000.0
    with pytest.raises(WeightMismatch, match=r"o_proj.lora_B.weight' times 8 is not exact in .*16"):
        pushed(trainer, model)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"r": 3}, "has not rank 3"),
        ({"use_next": "on"}, "use_next = 'on' is not supported"),
    ],
)
def test_what_is_not_merged_rightly_is_refused(
    model: Any, more: dict[str, Any], words: str
) -> None:
    trainer = trained(model, CONFIGS["plain"])
    config = trainer.peft_config["default"].to_dict() | more
    with pytest.raises(WeightMismatch, match=words):
        merged(dict(model.named_parameters()), tensors_of(trainer), config)


def test_an_adapter_of_other_layers_is_not_merged_into_nothing(model: Any) -> None:
    trainer = trained(model, CONFIGS["plain"])
    renamed = {name.replace("q_proj", "query"): one for name, one in tensors_of(trainer).items()}
    with pytest.raises(WeightMismatch, match="the model has no layer"):
        merged(dict(model.named_parameters()), renamed, CONFIGS["plain"])
