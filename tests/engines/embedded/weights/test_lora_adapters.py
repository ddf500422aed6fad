"""LoRA adapters: what they change, for whom, and that they are checked before they are taken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.embedded.weights.lora_adapters import CONFIG_FILE, TENSOR_FILE
from engines.tensors.torch_fingerprint import bytes_fingerprint
from safetensors.torch import save_file
from tests.engines.embedded import reference
from tests.engines.embedded.engine_client import PROMPT, Asker, payload

pytestmark = pytest.mark.embedded
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def adapter(path: Path, seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """Tensors strong enough to change the output."""
    generator = torch.Generator().manual_seed(seed)
    state = reference.state_dict(path)
    named = {}
    for layer in LAYERS:
        rows, columns = state[f"{layer}.weight"].shape
        shapes = {"A": (rank, columns), "B": (rows, rank)}
        for half, shape in shapes.items():
            key = f"base_model.model.{layer}.lora_{half}.weight"
            named[key] = torch.randn(shape, generator=generator)
    return named


def greedy_with(path: Path, named: dict[str, torch.Tensor], prompt: list[int]) -> list[int]:
    """What transformers says with the adapter merged into the weights."""
    model = reference.model(path)
    before = {layer: model.get_parameter(f"{layer}.weight").data.clone() for layer in LAYERS}
    try:
        for layer in LAYERS:
            down, up = (named[f"base_model.model.{layer}.lora_{half}.weight"] for half in "AB")
            model.get_parameter(f"{layer}.weight").data += CONFIG["lora_alpha"] / 4 * up @ down
        return reference.greedy(path, prompt)
    finally:
        for layer, weight in before.items():
            model.get_parameter(f"{layer}.weight").data.copy_(weight)


@pytest.fixture
async def lora(engine: Asker) -> AsyncIterator[Asker]:
    yield engine
    for card in (await engine.get("/v1/models"))["data"]:
        if "parent" in card:
            await engine.post("/unload_lora_adapter", lora_name=card["id"])


async def load(
    engine: Asker, name: str, named: dict[str, torch.Tensor], config: dict[str, Any] = CONFIG
) -> Any:
    return await engine.post(
        "/load_lora_adapter_from_tensors",
        lora_name=name,
        config_dict=config,
        serialized_named_tensors=payload(named),
    )


async def ask(engine: Asker, prompt: list[int], lora_path: str | None) -> Any:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 16}}
    return await engine.post("/generate", lora_path=lora_path, **body)


async def test_each_request_of_a_batch_has_its_own_adapter(
    lora: Asker, models: dict[str, Path]
) -> None:
    path = models["first"]
    one, other = adapter(path, 1), adapter(path, 2)
    await load(lora, "one", one)
    answer = await load(lora, "other", other)
    assert answer["loaded_adapters"] == ["one", "other"]
    wanted = {
        None: reference.greedy(path, PROMPT),
        "one": greedy_with(path, one, PROMPT),
        "other": greedy_with(path, other, PROMPT),
    }
    assert len({tuple(ids) for ids in wanted.values()}) == 3
    names = [None, "one", "other", "one", None]
    replies = await asyncio.gather(*(ask(lora, PROMPT, name) for name in names))
    assert [reply["output_ids"] for reply in replies] == [wanted[name] for name in names]
    batch = await lora.post(
        "/generate",
        input_ids=[PROMPT, PROMPT],
        lora_path=["other", None],
        sampling_params={"temperature": 0, "max_new_tokens": 16},
    )
    assert [reply["output_ids"] for reply in batch] == [wanted["other"], wanted[None]]


async def test_a_prompt_cached_without_the_adapter_is_not_read_with_it(
    lora: Asker, models: dict[str, Path]
) -> None:
    prompt = PROMPT * 4
    named = adapter(models["first"], 3)
    await load(lora, "one", named)
    assert (await ask(lora, prompt, None))["meta_info"]["cached_tokens"] == 0
    with_adapter = await ask(lora, prompt, "one")
    assert with_adapter["meta_info"]["cached_tokens"] == 0
    assert with_adapter["output_ids"] == greedy_with(models["first"], named, prompt)
    again = await ask(lora, prompt, "one")
    assert again["meta_info"]["cached_tokens"] > 0
    assert again["output_ids"] == with_adapter["output_ids"]


async def test_an_adapter_is_replaced_by_unloading_it_first(
    lora: Asker, models: dict[str, Path]
) -> None:
    path = models["first"]
    await load(lora, "one", adapter(path, 1))
    await ask(lora, PROMPT * 4, "one")
    new = adapter(path, 2)
    body = {"lora_name": "one", "config_dict": CONFIG, "serialized_named_tensors": payload(new)}
    assert "loaded already" in await lora.refused(400, "/load_lora_adapter_from_tensors", **body)
    await lora.post("/unload_lora_adapter", lora_name="one")
    await lora.post("/load_lora_adapter_from_tensors", **body)
    reply = await ask(lora, PROMPT * 4, "one")  # whose prompt the old one had cached
    assert reply["output_ids"] == greedy_with(path, new, PROMPT * 4)


async def test_a_request_in_flight_keeps_its_adapter_when_that_is_unloaded(
    lora: Asker, models: dict[str, Path]
) -> None:
    named = adapter(models["first"], 1)
    await load(lora, "one", named)
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 16}}
    await lora.post("/pause_generation", mode="in_place")
    asking = asyncio.create_task(lora.post("/generate", lora_path="one", **body))
    while not (await lora.get("/v1/loads"))["loads"][0]["num_waiting_reqs"]:
        if asking.done() or (await lora.get("/server_info"))["num_held_requests"]:
            break
    await lora.post("/unload_lora_adapter", lora_name="one")
    await lora.post("/continue_generation")
    assert (await asking)["output_ids"] == greedy_with(models["first"], named, PROMPT)


async def test_an_adapter_on_disk_is_loaded_by_its_path(
    lora: Asker, models: dict[str, Path], tmp_path: Path
) -> None:
    named = adapter(models["first"], 1)
    save_file(named, tmp_path / TENSOR_FILE)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(CONFIG))
    await lora.post("/load_lora_adapter", lora_name="one", lora_path=str(tmp_path))
    assert (await ask(lora, PROMPT, "one"))["output_ids"] == greedy_with(
        models["first"], named, PROMPT
    )
    body = {"lora_name": "two", "lora_path": str(tmp_path / "nowhere")}
    assert "cannot read an adapter" in await lora.refused(400, "/load_lora_adapter", **body)


async def test_openai_requests_name_the_adapter_behind_the_model(
    lora: Asker, models: dict[str, Path]
) -> None:
    named = adapter(models["first"], 1)
    await load(lora, "one", named)
    cards = (await lora.get("/v1/models"))["data"]
    base, card = cards
    assert (card["id"], card["parent"]) == ("one", base["id"])
    wanted = (await ask(lora, PROMPT, "one"))["text"]
    assert wanted != (await ask(lora, PROMPT, None))["text"]
    for body in ({"model": f"{base['id']}:one"}, {"model": base["id"], "lora_path": "one"}):
        reply = await lora.post(
            "/v1/completions", prompt=PROMPT, temperature=0, max_tokens=16, **body
        )
        assert reply["choices"][0]["text"] == wanted


async def test_the_checker_tells_adapters_apart_and_the_base_is_untouched(
    lora: Asker, models: dict[str, Path]
) -> None:
    async def checksums() -> dict[str, str]:
        return (await lora.post("/weights_checker"))["ranks"][0]["checksums"]

    before = await checksums()
    named = adapter(models["first"], 1)
    await load(lora, "one", named)
    await ask(lora, PROMPT, "one")
    after = await checksums()
    of_adapter = {name: after.pop(name) for name in list(after) if name.startswith("lora:")}
    assert after == before
    assert of_adapter == {
        f"lora:one:{name}": bytes_fingerprint(name, tensor) for name, tensor in named.items()
    }


Spoil = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def no_such_layer(named: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    named[FIRST.replace("q_proj", "nonsense")] = named[FIRST]


def wrong_shape(named: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    named[FIRST] = named[FIRST][:, 1:].clone()


def half(named: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del named[FIRST]


def the_head(named: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    named["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 256)


def other_rank(named: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["r"] = 8


def large_rank(named: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["r"] = 65


def no_alpha(named: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del config["lora_alpha"]


def nothing(named: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    named.clear()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_such_layer, "no linear layer 'model.layers.0.self_attn.nonsense'"),
        (wrong_shape, "lora_A has shape [4, 255], not [4, 256]"),
        (half, "lora_A is missing"),
        (the_head, "no linear layer 'lm_head'"),
        (other_rank, "lora_A has shape [4, 256], not [8, 256]"),
        (large_rank, "rank 65 is over --max-lora-rank 64"),
        (no_alpha, "needs r, a whole number, and lora_alpha"),
        (nothing, "no tensors"),
    ],
)
async def test_what_does_not_fit_is_refused_and_not_loaded(
    lora: Asker, models: dict[str, Path], spoil: Spoil, words: str
) -> None:
    named, config = adapter(models["first"], 1), dict(CONFIG)
    spoil(named, config)
    body = {"config_dict": config, "serialized_named_tensors": payload(named)}
    path = "/load_lora_adapter_from_tensors"
    assert words in await lora.refused(400, path, lora_name="bad", **body)
    words = await lora.refused(400, "/generate", input_ids=PROMPT, lora_path="bad")
    assert "'bad' is not loaded" in words
    await lora.refused(400, "/unload_lora_adapter", lora_name="bad")


@pytest.mark.parametrize(
    "more", [{"use_dora": True}, {"bias": "all"}, {"layer_replication": [[0, 1]]}]
)
async def test_other_kinds_of_lora_are_a_501(
    lora: Asker, models: dict[str, Path], more: dict[str, Any]
) -> None:
    body = {
        "lora_name": "bad",
        "config_dict": CONFIG | more,
        "serialized_named_tensors": payload(adapter(models["first"], 1)),
    }
    assert "is not supported" in await lora.refused(501, "/load_lora_adapter_from_tensors", **body)


async def test_ranks_and_scales_of_modules_are_pefts(lora: Asker, models: dict[str, Path]) -> None:
    path = models["first"]
    named = adapter(path, 1)
    small = {name: part[:2] if "lora_A" in name else part[:, :2] for name, part in named.items()}
    mixed = {name: (small if "q_proj" in name else named)[name].clone() for name in named}
    # q_proj: 8 / sqrt(2); down_proj: 32 / sqrt(4).
    more = {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 32}}
    await load(lora, "one", mixed, CONFIG | more)
    # The same by CONFIG's scale of 2.
    factors = {"q_proj": 8 / 2**0.5 / 2, "down_proj": 32 / 2 / 2}
    same = {
        name: part * next(factors[one] for one in factors if one in name)
        if "lora_B" in name
        else part
        for name, part in mixed.items()
    }
    assert (await ask(lora, PROMPT, "one"))["output_ids"] == greedy_with(path, same, PROMPT)


async def test_without_the_flag_adapters_are_refused(backed: Asker) -> None:
    body = {"lora_name": "a", "config_dict": CONFIG, "serialized_named_tensors": payload({})}
    words = await backed.refused(400, "/load_lora_adapter_from_tensors", **body)
    assert "start with --enable-lora" in words
