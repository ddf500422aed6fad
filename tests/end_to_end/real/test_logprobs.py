"""Of which distribution the log-probs of every kind of engine are, in each of its modes, for each
sampling parameter and each pair of them, with transformers as the truth: a reply's kind is so.

Each test of the matrix leaves its figures in the results (``--junitxml``), from which
``tests/engines/protocol/logprob_table.py`` makes the table of docs/how-to/mismatch.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import rollout
from engines.protocol import GenerateReply
from engines.vllm import routes
from engines.vllm.vllm_json import generate_body
from rollout.config import RolloutConfig
from rollout.core.errors import GenerationFailed
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from rollout.testing.tiny_model import make_tiny_model
from tests.support.kinds import not_for
from tests.support.logprob_cells import CELLS, COUNTING, MODES, NUM, PROMPT, STOPS, Truth
from tests.support.models import FOR_VLLM
from tests.support.real_policy import one_engine

pytestmark = pytest.mark.timeout(900)
ROUNDING, CHANGED = 1e-4, 2e-4
"""Nats: at most for any token between two that are the same, at least on average between others."""
_ORIGINAL = {"env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}}
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "original": _ORIGINAL,
    "processed": {},
    "raw": {"options": {"logprobs-mode": "raw_logprobs"}},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("embedded", marks=pytest.mark.embedded),
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model_path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its generation config has a cut, which vLLM applies on OpenAI's routes."""
    shape = {"num_layers": 1, **(FOR_VLLM if kind == "vllm" else {"hidden_size": 32})}
    path = make_tiny_model(tmp_path_factory.mktemp("logprobs") / "model", seed=1, **shape)
    file = path / "generation_config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**config, "do_sample": True, "top_p": 0.5}))
    return path


@pytest.fixture(scope="module")
def handles(
    kind: str, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, ServerHandle]]:
    """A server for each mode."""
    servers = {
        mode: {
            "model_path": str(model_path),
            "groups": {"main": one_engine(kind, **_SETTINGS[mode])},
        }
        for mode in MODES[kind]
    }
    logs = tmp_path_factory.mktemp("logs")
    config = RolloutConfig.from_dict({"log_dir": str(logs), "servers": servers})
    with launch_local(config) as deployment:
        yield {mode: deployment[mode] for mode in MODES[kind]}


@pytest.fixture(scope="module")
def truth(model_path: Path) -> Truth:
    return Truth(model_path)


def params_of(sampling: Mapping[str, Any]) -> rollout.SamplingParams:
    bias = sampling.get("logit_bias")
    more: dict[str, Any] = {"max_new_tokens": NUM, "ignore_eos": True, **sampling}
    if bias:
        more["logit_bias"] = {int(token): add for token, add in bias.items()}
    if "min_new_tokens" in sampling:
        more["stop_token_ids"] = STOPS
    return rollout.SamplingParams(**more)


def drawn(handle: ServerHandle, cells: list[dict[str, Any]]) -> list[GenerateReply | str]:
    """The reply of each cell, or why there is none; all are sent at once."""
    calls = [handle.generate([[*PROMPT]], params_of(sampling)) for sampling in cells]
    return [_reply(call) for call in calls]


def _reply(call: Any) -> GenerateReply | str:
    try:
        (reply,) = call.result(300)
    except GenerationFailed as error:
        if "400" not in str(error):
            raise
        return str(error)
    assert isinstance(reply, GenerateReply)
    return reply


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def compared(truth: Truth, reply: GenerateReply, temperature: float) -> Any:
    """The report of a trainer that computes the full distribution at this temperature."""
    sample = rollout.Sample(
        [*PROMPT],
        list(reply.output_ids),
        list(reply.output_logprobs or ()),
        weight_versions=reply.weight_versions,
        logprob_kind=reply.logprob_kind,
    )
    row = truth.full(reply.output_ids, temperature)
    return rollout.compare_logprobs([sample], [row], temperature=temperature, limit=0.001)


@pytest.mark.parametrize("number", [0, 1])
def test_the_log_probs_of_each_pair_of_parameters_are_of_the_kind_that_the_reply_names(
    kind: str, handles: Any, truth: Truth, number: int, record_testsuite_property: Any
) -> None:
    mode, steps = list(MODES[kind].items())[number]
    cells: list[dict[str, Any]] = []
    wrong: list[Any] = []
    for sampling, reply in zip(CELLS, drawn(handles[mode], CELLS), strict=True):
        if isinstance(reply, str):
            cells.append({"sampling": sampling, "kind": "refused"})
            continue
        temperature = sampling.get("temperature", 1.0)
        ids, found = reply.output_ids, torch.tensor(reply.output_logprobs)
        full, of_kind = truth.full(ids, temperature), [truth.changed(ids, sampling, steps)]
        if reply.logprob_kind in ("full", "raw"):
            of_kind = [full if reply.logprob_kind == "full" else truth.full(ids)]
        elif reply.logprob_kind == "cut":  # a trainer can compute it
            of_kind.append(truth.full(ids, temperature, cuts=sampling))
        is_known = not (steps.counts_late and sampling.keys() & set(COUNTING))
        own = max(largest(found, of) for of in of_kind) if is_known else None
        far = float((found - full).abs().mean())
        cells.append({"sampling": sampling, "kind": reply.logprob_kind, "own": own, "full": far})
        is_full = reply.logprob_kind == "full"
        if (own or 0.0) > ROUNDING or (far > ROUNDING if is_full else far < CHANGED):
            wrong.append((sampling, str(reply.logprob_kind), own, far))
        mismatch = compared(truth, reply, temperature or 1.0).mismatch
        if is_full:
            assert mismatch is None, mismatch
        elif mismatch is not None:  # or it is in ``wrong``
            assert f"logprob_kind is {reply.logprob_kind}" in mismatch.why
    assert not wrong, wrong
    record_testsuite_property(f"logprobs {kind} {mode}", json.dumps(cells))


_OF_PROMPTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 0.3, "top_p": 0.5},
    {"top_p": 0.5},
    {"presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"logit_bias": {"45": 4.0}},
]


@pytest.mark.parametrize("number", [0, 1])
def test_log_probs_of_a_prompt_are_at_temperature_1_whatever_the_sampling_is(
    kind: str, handles: Any, truth: Truth, number: int, record_testsuite_property: Any
) -> None:
    mode = list(MODES[kind])[number]
    ids = list(range(20, 20 + NUM))
    ask = of_prompt_by_vllm if kind == "vllm" else of_prompt
    figures = []
    for sampling in _OF_PROMPTS:
        if kind == "embedded" and not sampling.keys() <= {"temperature", "top_p"}:
            continue  # it refuses the others
        params = params_of({**sampling, "max_new_tokens": 1})
        found = torch.tensor(ask(handles[mode], [*PROMPT, *ids], params)[-NUM:])
        raw, full = (truth.full(ids, at) for at in (1.0, sampling.get("temperature", 1.0)))
        figures.append([largest(found, raw), largest(found, full)])
    assert max(at_1 for at_1, _ in figures) < ROUNDING
    record_testsuite_property(f"prompts {kind} {mode}", json.dumps(figures))


def of_prompt(handle: ServerHandle, prompt: list[int], params: rollout.SamplingParams) -> Any:
    """Its log-probs, but of the first token."""
    (reply,) = handle.generate([prompt], params, prompt_logprobs=True).result(300)
    return reply.input_logprobs


def of_prompt_by_vllm(
    handle: ServerHandle, prompt: list[int], params: rollout.SamplingParams
) -> Any:
    """The same by its own route: its replies in SGLang's form have none."""
    body = generate_body(prompt, params, return_logprob=True, wants_prompt=True)
    answer = httpx.post(handle.url + routes.GENERATE, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    entries = zip(prompt[1:], answer.json()["prompt_logprobs"][1:], strict=True)
    return [entry[str(token)]["logprob"] for token, entry in entries]


@pytest.mark.parametrize("number", [0, 1])
def test_log_probs_with_top_k_1_have_a_kind_that_is_no_trainers(
    kind: str, handles: Any, truth: Truth, number: int
) -> None:
    """SGLang leaves the temperature out where all requests of a batch have it, or are greedy."""
    mode = list(MODES[kind])[number]
    sampling = {"top_k": 1, "temperature": 0.3}
    (alone,) = drawn(handles[mode], [sampling])
    beside = drawn(handles[mode], [{"temperature": 0.3}] * 3 + [sampling])[-1]
    expected = "cut" if mode == "processed" else "raw"
    for reply in (alone, beside):
        assert isinstance(reply, GenerateReply)
        assert reply.logprob_kind == expected
    assert isinstance(alone, GenerateReply)
    found = torch.tensor(alone.output_logprobs)
    of = torch.zeros(NUM) if expected == "cut" else truth.full(alone.output_ids)
    assert largest(found, of) < ROUNDING


@pytest.mark.parametrize(("own", "cut"), [({}, "cut"), ({"top_p": 1.0}, "full")], ids=repr)
@not_for("sglang", "embedded")
def test_on_openais_routes_the_checkpoint_may_cut(
    handles: Any, truth: Truth, own: dict[str, Any], cut: str
) -> None:
    body = {"prompt": [*PROMPT], "max_tokens": NUM, "ignore_eos": True, "return_token_ids": True}
    body |= {"logprobs": 0, "temperature": 1.0, **own}
    for mode, kind in (("processed", cut), ("raw", "full")):
        answer = httpx.post(handles[mode].url + "/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert answer.headers["x-logprob-kind"] == kind
        found = torch.tensor(choice["logprobs"]["token_logprobs"])
        far = largest(found, truth.full(choice["token_ids"]))
        assert far < ROUNDING if kind == "full" else far > 0.1


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@not_for("sglang", "vllm")  # over fakes of them: tests/rollout/router/proxy/test_logprob_kinds.py
def test_log_probs_of_openais_routes_are_of_the_kind_in_the_header(
    handles: Any, truth: Truth, path: str, is_streamed: bool
) -> None:
    has_ids = not (is_streamed and "chat" in path)
    body = {"max_tokens": NUM, "ignore_eos": True, "return_token_ids": has_ids, "logprobs": True}
    body |= {"prompt": [*PROMPT], "messages": [{"role": "user", "content": "a"}]}
    for mode, sampling, kind in (
        ("default", {"temperature": 0.3}, "full"),
        ("original", {"temperature": 0.3}, "raw"),
        ("default", {"temperature": 0.3, "min_tokens": 2}, "penalised"),
    ):
        answer = httpx.post(
            handles[mode].url + path,
            json={**body, **sampling, "stream": is_streamed},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-logprob-kind"] == kind
        lines = [line[6:] for line in answer.text.split("\n") if line[:7] == "data: {"]
        events = map(json.loads, lines if is_streamed else [answer.text])
        choices = [choice for event in events for choice in event["choices"]]
        prompt, ids, logprobs = read_choices(choices)
        assert len(logprobs) == NUM
        if has_ids and kind != "penalised":
            at = 1.0 if kind == "raw" else 0.3
            assert largest(torch.tensor(logprobs), truth.full(ids, at, prompt)) < ROUNDING


def read_choices(choices: list[Any]) -> tuple[list[int], list[int], list[float]]:
    """Prompt, output and log-probs in the choices of one completion or chat."""
    prompt = next((one["prompt_token_ids"] for one in choices if "prompt_token_ids" in one), [])
    ids: list[int] = []
    logprobs: list[float] = []
    for one in choices:
        ids += one.get("token_ids") or one.get("response_token_ids") or []
        found = one.get("logprobs") or {}
        logprobs += found.get("token_logprobs") or []
        logprobs += [token["logprob"] for token in found.get("content") or []]
    return prompt, ids, logprobs
