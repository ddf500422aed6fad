"""Of which distribution real vLLM's log-probs are, in both of its modes, with transformers as the
truth: what a reply says of itself is so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

import rollout
from engines.protocol.logprob_kind import CUTS
from rollout.driver.logprobs.token_logprobs import token_logprobs
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.support.models import FOR_VLLM, make_plain_model
from tests.support.real_policy import one_engine, real_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PROMPT = [11, 12, 13]
NUM = 48
ROUNDING, CHANGED, FAR = 1e-4, 0.01, 0.1
"""Nats, on average: at most between two that are the same, at least behind a penalty, and a cut."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its generation config has a cut, which vLLM applies on OpenAI's routes."""
    path = make_plain_model(tmp_path_factory.mktemp("logprobs") / "model", 1, **FOR_VLLM)
    file = path / "generation_config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**config, "do_sample": True, "top_p": 0.5}))
    return path


@pytest.fixture(scope="module")
def handle(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    """A group in each mode."""
    groups = {
        "processed": one_engine("vllm"),
        "raw": one_engine("vllm", options={"logprobs-mode": "raw_logprobs"}),
    }
    config = real_config(model_path, tmp_path_factory.mktemp("logs"), groups)
    with launch_local(config) as deployment:
        yield deployment["policy"]


@pytest.fixture(scope="module")
def model(model_path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def gap(model: Any, ids: list[int], logprobs: list[float], temperature: float) -> float:
    """The average distance from the full distribution at this temperature."""
    whole = torch.tensor([[*PROMPT, *ids]])
    with torch.no_grad():
        logits = model(whole).logits
    values = token_logprobs(logits[:, :-1], whole[:, 1:], temperature=temperature)
    return float((values[0, len(PROMPT) - 1 :] - torch.tensor(logprobs)).abs().mean())


@pytest.mark.parametrize(
    ("sampling", "processed", "raw"),
    [
        ({}, "full", "full"),
        ({"temperature": 0.3}, "full", "raw"),
        ({"temperature": 1.7}, "full", "raw"),
        ({"temperature": 0.0}, "full", "full"),
        ({"temperature": 0.0, "top_p": 0.5}, "full", "full"),
        ({"top_p": 0.5}, "cut", "full"),
        ({"top_k": 5}, "cut", "full"),
        ({"min_p": 0.2}, "cut", "full"),
        ({"temperature": 0.3, "top_p": 0.5}, "cut", "raw"),
        ({"repetition_penalty": 2.0}, "cut", "full"),
        ({"presence_penalty": 1.5}, "cut", "full"),
        ({"frequency_penalty": 1.0}, "cut", "full"),
        ({"logit_bias": {40: 4.0}}, "cut", "full"),
    ],
    ids=repr,
)
def test_a_reply_says_of_which_distribution_its_log_probs_are(
    handle: ServerHandle, model: Any, sampling: dict[str, Any], processed: str, raw: str
) -> None:
    params = rollout.SamplingParams(max_new_tokens=NUM, ignore_eos=True, **sampling)
    replies = handle.generate([PROMPT] * 8, params).result(120)
    seen = {reply.engine_id: reply.logprob_kind for reply in replies}
    assert seen == {"processed-0": processed, "raw-0": raw}
    temperature = sampling.get("temperature", 1.0)
    least = FAR if sampling.keys() & set(CUTS) else CHANGED
    for reply in replies:
        assert reply.output_logprobs is not None
        of = list(reply.output_ids), list(reply.output_logprobs)
        far = gap(model, *of, temperature)
        assert far < ROUNDING if reply.logprob_kind == "full" else far > least
        if reply.logprob_kind == "raw":
            assert gap(model, *of, 1.0) < ROUNDING


@pytest.mark.parametrize(("own", "kind"), [({}, "cut"), ({"top_p": 1.0}, "full")], ids=repr)
def test_on_openais_routes_the_checkpoint_may_cut(
    handle: ServerHandle, model: Any, own: dict[str, Any], kind: str
) -> None:
    body = {"prompt": PROMPT, "max_tokens": NUM, "ignore_eos": True, "return_token_ids": True}
    body |= {"logprobs": 0, "temperature": 1.0, **own}
    kinds = {"processed-0": kind, "raw-0": "full"}
    for _ in range(2):
        answer = httpx.post(handle.url + "/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        found = answer.headers["x-logprob-kind"]
        assert found == kinds.pop(answer.headers["x-engine-id"])
        far = gap(model, choice["token_ids"], choice["logprobs"]["token_logprobs"], 1.0)
        assert far < ROUNDING if found == "full" else far > FAR
