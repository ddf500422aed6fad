"""Every family computes what transformers computes, over random small models."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines.embedded.core.model_config import model_config, read_model_config
from engines.embedded.generation.generation import Generation
from engines.embedded.generation.kv_cache import KvCache
from engines.embedded.generation.pages import Pages
from engines.embedded.generation.sampling_params import Params
from engines.embedded.generation.scheduler import Scheduler
from engines.embedded.memory.regions import Memory
from engines.embedded.model.attention import BatchedSequence, plan
from engines.embedded.model.decoder import Decoder, Step
from engines.embedded.weights.model_loading import load_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from safetensors.torch import load_file, save_file
from tests.engines.embedded import reference

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(300)]
torch.set_num_threads(1)  # colleagues share the cores
IS_4 = transformers.__version__.startswith("4.")
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
LENGTH = 24
CLOSE = 1e-5
DEVICE = torch.device("cpu")

# Prompts are longer than the original length: scaling is for positions beyond it.
ORIGINAL: dict[str, Any] = {"original_max_position_embeddings": 16}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    **ORIGINAL,
}
YARN: dict[str, Any] = {"rope_type": "yarn", **ORIGINAL}
ropes = some.sampled_from(
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        {**YARN, "factor": 4.0},
        {**YARN, "factor": 2.5, "attention_factor": 1.3, "beta_fast": 8},
        {**YARN, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        {**YARN, "factor": 4.0, "truncate": False},
    ]
)


@some.composite
def configs(draw: some.DrawFn, family: str) -> dict[str, Any]:
    """The arguments of a config of transformers."""
    kv_heads = draw(some.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(some.sampled_from([1, 2, 4]))
    layers = draw(some.integers(1, 3))
    found: dict[str, Any] = {
        "vocab_size": draw(some.integers(20, 60)),
        "hidden_size": heads * draw(some.sampled_from([4, 8])),
        "intermediate_size": draw(some.integers(5, 40)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "rms_norm_eps": draw(some.sampled_from([1e-6, 1e-5])),
        "tie_word_embeddings": draw(some.booleans()),
        "initializer_range": 0.2,
        "rope_parameters": {"rope_theta": draw(some.sampled_from([1e4, 5e5])), **draw(ropes)},
        "head_dim": draw(some.sampled_from([4, 8, 16])),
    }
    if family in ("llama", "qwen3", "qwen3_moe"):
        found["attention_bias"] = draw(some.booleans())
    if family == "llama":
        found["mlp_bias"] = draw(some.booleans())
    else:
        found["sliding_window"] = draw(some.sampled_from([None, 1, 5, 64]))
    if family.startswith("qwen"):
        found["use_sliding_window"] = draw(some.booleans())
    if family in ("qwen2", "qwen3"):
        found["max_window_layers"] = draw(some.integers(0, layers))
    if family == "qwen3_moe":
        experts = draw(some.integers(2, 6))
        found |= {
            "num_experts": experts,
            "num_experts_per_tok": draw(some.integers(1, experts)),
            "moe_intermediate_size": draw(
                some.sampled_from([4, 8, 12])
            ),  # transformers takes no odd ones
            "norm_topk_prob": draw(some.booleans()),
            "decoder_sparse_step": draw(some.integers(1, 2)),
            "mlp_only_layers": draw(some.sampled_from([[], [0], [1]])),
        }
    return found


def their_model(family: str, arguments: dict[str, Any]) -> Any:
    """transformers' model, with no value that is zero or one for all."""
    if IS_4 and "rope_parameters" in arguments:
        rope = dict(arguments["rope_parameters"])
        theta = rope.pop("rope_theta")
        scaling = None if rope["rope_type"] == "default" else rope
        arguments = {**arguments, "rope_theta": theta, "rope_scaling": scaling}
        del arguments["rope_parameters"]
    config = transformers.AutoConfig.for_model(family, **arguments)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        make: Any = transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def our_model(folder: Path, theirs: Any, change: Any = None) -> Decoder:
    """The engine's model, from the folder that transformers saves."""
    theirs.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    if change is not None:
        change(raw)
    memory = Memory(DEVICE, saver=False, weights_backup=False)
    return load_model(model_config(raw, {}), str(folder), "auto", memory)


def our_logits(model: Decoder, ids: list[list[int]], experts: Any = None) -> list[torch.Tensor]:
    """Of fresh prompts in one batch."""
    members = [BatchedSequence(len(one), len(one)) for one in ids]
    step = Step(
        tokens=torch.tensor([token for one in ids for token in one]),
        positions=torch.cat([torch.arange(len(one)) for one in ids]),
        plans={window: plan(members, 16, DEVICE, window) for window in set(model.config.windows)},
        experts=experts,
    )
    with torch.inference_mode():
        logits = model(step, slice(None))
    return list(logits.split([len(one) for one in ids]))


def prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randint(vocabulary, (length,), generator=generator).tolist()
        for length in (LENGTH, 1, LENGTH - 3)
    ]


def their_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


class Batch:
    """Greedy completions by the engine's own scheduler and cache.

    Attributes:
        logits: those that made the tokens of each prompt, in order.
    """

    def __init__(self, model: Decoder, ids: list[list[int]], num_new: int) -> None:
        memory = Memory(DEVICE, saver=False, weights_backup=False)
        self.cache = KvCache(model, memory, 24)
        self.scheduler = Scheduler(Pages(24), max_requests=8, max_tokens=29)
        self.generations = [
            Generation(str(number), one, Params(max_new_tokens=num_new))
            for number, one in enumerate(ids)
        ]
        self.logits: dict[str, list[torch.Tensor]] = {one.rid: [] for one in self.generations}
        for one in self.generations:
            self.scheduler.add(one)
        while self.scheduler.num_in_flight:
            self._step(model)

    def _step(self, model: Decoder) -> None:
        parts = self.scheduler.next_step()
        step = self.cache.step(parts)
        ends = itertools.accumulate(part.num_tokens for part in parts)
        rows = torch.tensor(list(ends)) - 1
        with torch.inference_mode():
            logits = model(step, rows)
        for part, row in zip(parts, logits, strict=True):
            self.scheduler.advance(part)
            if part.is_last:
                generation, token = part.sequence.generation, int(row.argmax())
                self.logits[generation.rid].append(row)
                part.sequence.ids.append(token)
                if generation.add(token, 0.0, "0"):
                    self.scheduler.remove(generation.rid)


def check_prompts(ours: Decoder, theirs: Any, vocabulary: int) -> None:
    ids = prompts(vocabulary)
    experts: list[torch.Tensor] = []
    found = our_logits(ours, ids, experts)
    for one, logits in zip(ids, found, strict=True):
        torch.testing.assert_close(logits, their_logits(theirs, one), atol=CLOSE, rtol=CLOSE)
    if experts:
        for one, chosen in zip(ids, torch.stack(experts).split([*map(len, ids)], 1), strict=True):
            probabilities, expected = reference.routing(theirs, one)
            # By their probabilities, since two experts may be as good as equal.
            got, wanted = (probabilities.gather(2, index) for index in (chosen, expected))
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


def check_completions(ours: Decoder, theirs: Any, vocabulary: int) -> None:
    batch = Batch(ours, [*prompts(vocabulary), prompts(vocabulary)[0]], num_new=8)
    assert batch.generations[-1].prompt_ids == batch.generations[0].prompt_ids
    for one in batch.generations:
        logits = their_logits(theirs, [*one.prompt_ids, *one.output_ids[:-1]])
        expected = logits[len(one.prompt_ids) - 1 :]
        got = torch.stack(batch.logits[one.rid])
        torch.testing.assert_close(got, expected, atol=CLOSE, rtol=CLOSE)
        chosen = expected.gather(1, torch.tensor(one.output_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(chosen, expected.max(dim=1).values, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=some.data())
def test_logits_experts_and_greedy_tokens_are_those_of_transformers(
    family: str, tmp_path: Path, data: some.DataObject
) -> None:
    arguments = data.draw(configs(family))
    theirs = their_model(family, arguments)
    ours = our_model(tmp_path, theirs)
    check_prompts(ours, theirs, arguments["vocab_size"])
    check_completions(ours, theirs, arguments["vocab_size"])


VOCABULARY = 40
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def test_a_config_of_transformers_4_is_the_same_model(tmp_path: Path) -> None:
    theirs = their_model("llama", {**SMALL, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}})

    def as_in_4(raw: dict[str, Any]) -> None:
        raw.pop("rope_parameters", None)  # of transformers 5
        raw["torch_dtype"] = raw.pop("dtype")
        raw |= {"rope_theta": 5e5, "rope_scaling": LLAMA3}

    check_prompts(our_model(tmp_path, theirs, as_in_4), theirs, VOCABULARY)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_the_exact_logits_as_that_of_transformers(
    family: str, tmp_path: Path
) -> None:
    theirs = their_model(family, {**SMALL, "head_dim": 8}).to(torch.bfloat16)
    ours = our_model(tmp_path, theirs)
    assert ours.dtype is torch.bfloat16
    ids = prompts(VOCABULARY)
    found = our_logits(ours, ids)
    rounded = [their_logits(theirs, one) for one in ids]
    assert {logits.dtype for logits in (*found, *rounded)} == {torch.bfloat16}
    exact = [their_logits(theirs.float(), one) for one in ids]

    def error(of: list[torch.Tensor]) -> float:
        pairs = zip(of, exact, strict=True)
        return float(torch.cat([(one - other).abs().flatten() for one, other in pairs]).mean())

    assert error(found) < 1.3 * error(rounded)


def test_a_checkpoint_without_one_of_the_tensors_is_refused_by_its_name(tmp_path: Path) -> None:
    theirs = their_model("qwen2", SMALL)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    theirs.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    memory = Memory(DEVICE, saver=False, weights_backup=False)
    words = re.escape("there is no 'model.layers.1.self_attn.q_proj.bias'")
    with pytest.raises(ValueError, match=words):
        load_model(read_model_config(tmp_path), str(tmp_path), "auto", memory)


def test_only_the_files_of_the_index_are_read(tmp_path: Path) -> None:
    """Mistral's folders have the weights twice, and old ones of Llama have frequencies in them."""
    theirs = their_model("llama", SMALL)
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    save_file({"tok_embeddings.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    first = min(tmp_path.glob("model-*.safetensors"))
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file({**load_file(first), **computed}, first)
    memory = Memory(DEVICE, saver=False, weights_backup=False)
    ours = load_model(read_model_config(tmp_path), str(tmp_path), "auto", memory)
    check_prompts(ours, theirs, VOCABULARY)
