"""Of which distribution a real engine's log-probs are, in each of its modes, with transformers as
the truth: what a reply says of itself is so, and a comparison with the trainer names the cause."""

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
from engines.protocol import GenerateReply
from engines.protocol.logprob_kind import CUTS
from rollout.driver.logprobs.token_logprobs import token_logprobs
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.support.kinds import not_for
from tests.support.models import FOR_VLLM, make_plain_model
from tests.support.real_policy import one_engine, real_config

pytestmark = pytest.mark.timeout(900)
PROMPT = [11, 12, 13]
NUM = 48
ROUNDING, CHANGED, FAR = 1e-4, 0.01, 0.1
"""Nats, on average: at most between two that are the same, at least behind a penalty, and a cut."""
MODES = {
    "sglang": {"default": {}, "original": {"env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}}},
    "vllm": {"processed": {}, "raw": {"options": {"logprobs-mode": "raw_logprobs"}}},
}
"""Two groups of each kind: as it is, and with its log-probs before the sampling."""
SAID = {"raw": "logprob_kind is raw", "cut": "logprob_kind is cut"}


@pytest.fixture(scope="module")
def model_path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its generation config has a cut, which vLLM applies on OpenAI's routes."""
    shape = FOR_VLLM if kind == "vllm" else {}
    path = make_plain_model(tmp_path_factory.mktemp("logprobs") / "model", 1, **shape)
    file = path / "generation_config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**config, "do_sample": True, "top_p": 0.5}))
    return path


@pytest.fixture(scope="module")
def handle(
    kind: str, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerHandle]:
    groups = {name: one_engine(kind, **engine) for name, engine in MODES[kind].items()}
    config = real_config(model_path, tmp_path_factory.mktemp("logs"), groups)
    with launch_local(config) as deployment:
        yield deployment["policy"]


@pytest.fixture(scope="module")
def model(model_path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def truth(model: Any, ids: list[int], temperature: float) -> torch.Tensor:
    """The log-probs of these ids in the full distribution at this temperature."""
    whole = torch.tensor([[*PROMPT, *ids]])
    with torch.no_grad():
        logits = model(whole).logits
    return token_logprobs(logits[:, :-1], whole[:, 1:], temperature=temperature)[
        0, len(PROMPT) - 1 :
    ]


def gap(model: Any, ids: list[int], logprobs: list[float], temperature: float) -> float:
    """The average distance from that."""
    return float((truth(model, ids, temperature) - torch.tensor(logprobs)).abs().mean())


def compared(model: Any, replies: list[GenerateReply], temperature: float) -> Any:
    """The report of a trainer that computes the full distribution at this temperature."""
    samples = [
        rollout.Sample(
            PROMPT,
            list(reply.output_ids),
            list(reply.output_logprobs or ()),
            weight_versions=reply.weight_versions,
            logprob_kind=reply.logprob_kind,
        )
        for reply in replies
    ]
    rows = [truth(model, sample.output_ids, temperature) for sample in samples]
    return rollout.compare_logprobs(samples, rows, temperature=temperature, limit=0.001)


# The sampling, and what the replies of either mode are of: SGLang's, then vLLM's.
ROWS: list[tuple[dict[str, Any], tuple[str, str], tuple[str, str]]] = [
    ({}, ("full", "full"), ("full", "full")),
    ({"temperature": 0.3}, ("full", "raw"), ("full", "raw")),
    ({"temperature": 1.7}, ("full", "raw"), ("full", "raw")),
    ({"temperature": 0.0}, ("full", "full"), ("full", "full")),
    ({"temperature": 0.0, "top_p": 0.5}, ("full", "full"), ("full", "full")),
    ({"top_p": 0.5}, ("full", "full"), ("cut", "full")),
    ({"top_k": 5}, ("full", "full"), ("cut", "full")),
    ({"min_p": 0.2}, ("full", "full"), ("cut", "full")),
    ({"temperature": 0.3, "top_p": 0.5}, ("full", "raw"), ("cut", "raw")),
    ({"repetition_penalty": 2.0}, ("cut", "cut"), ("cut", "full")),
    ({"presence_penalty": 1.5}, ("cut", "cut"), ("cut", "full")),
    ({"frequency_penalty": 1.0}, ("cut", "cut"), ("cut", "full")),
    ({"logit_bias": {40: 4.0}}, ("cut", "cut"), ("cut", "full")),
]


@pytest.mark.parametrize(("sampling", "sglang", "vllm"), ROWS, ids=[repr(row[0]) for row in ROWS])
def test_a_reply_says_of_which_distribution_its_log_probs_are(
    kind: str,
    handle: ServerHandle,
    model: Any,
    sampling: dict[str, Any],
    sglang: tuple[str, str],
    vllm: tuple[str, str],
) -> None:
    kinds = dict(zip(MODES[kind], sglang if kind == "sglang" else vllm, strict=True))
    params = rollout.SamplingParams(max_new_tokens=NUM, ignore_eos=True, **sampling)
    replies = handle.generate([PROMPT] * 8, params).result(120)
    seen = {reply.engine_id: reply.logprob_kind for reply in replies}
    assert seen == {f"{name}-0": found for name, found in kinds.items()}
    temperature = sampling.get("temperature", 1.0)
    least = FAR if sampling.keys() & set(CUTS) else CHANGED
    for reply in replies:
        assert reply.output_logprobs is not None
        of = list(reply.output_ids), list(reply.output_logprobs)
        far = gap(model, *of, temperature)
        assert far < ROUNDING if reply.logprob_kind == "full" else far > least
        if reply.logprob_kind == "raw":
            assert gap(model, *of, 1.0) < ROUNDING
    for name, found in kinds.items():
        of_mode = [reply for reply in replies if reply.engine_id == f"{name}-0"]
        mismatch = compared(model, of_mode, temperature or 1.0).mismatch
        assert mismatch is None if found == "full" else SAID[found] in mismatch.why


@pytest.mark.parametrize(("own", "cut"), [({}, "cut"), ({"top_p": 1.0}, "full")], ids=repr)
@not_for("sglang")
def test_on_openais_routes_the_checkpoint_may_cut(
    handle: ServerHandle, model: Any, own: dict[str, Any], cut: str
) -> None:
    body = {"prompt": PROMPT, "max_tokens": NUM, "ignore_eos": True, "return_token_ids": True}
    body |= {"logprobs": 0, "temperature": 1.0, **own}
    kinds = {"processed-0": cut, "raw-0": "full"}
    for _ in range(2):
        answer = httpx.post(handle.url + "/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        found = answer.headers["x-logprob-kind"]
        assert found == kinds.pop(answer.headers["x-engine-id"])
        far = gap(model, choice["token_ids"], choice["logprobs"]["token_logprobs"], 1.0)
        assert far < ROUNDING if found == "full" else far > FAR
