"""Adapters of the tiny model, and answers to requests that name their weights or do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

import rollout
from engines.protocol.adapter_names import version_of
from rollout.runtime.handle import ServerHandle
from tests.support.load import PROMPTS
from tests.support.referee import Answer, Span

NUM_TOKENS = 8
GREEDY = rollout.SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
BASE: Mapping[str, Any] = {"lora_path": None}
_PROMPT, _OTHER = (list(prompt) for prompt in PROMPTS[:2])
_OPENAI = {"model": "any", "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
_MESSAGES = [{"role": "user", "content": "What is it?"}]


def make_adapter(rank: int, seed: int) -> dict[str, Any]:
    """An adapter of ``make_plain_model``'s query and value projections."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, width in {"q_proj": 32, "v_proj": 16}.items():
        name = f"base_model.model.model.layers.0.self_attn.{module}"
        for half, shape in {"A": (rank, 32), "B": (width, rank)}.items():
            tensors[f"{name}.lora_{half}.weight"] = torch.randn(shape, generator=generator)
    return tensors


def split_by_adapter(tensors: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """An engine's fingerprints: of its base, and of the newest version of its adapter by tensor."""
    base = {name: one for name, one in tensors.items() if not name.startswith("lora:")}
    versions: dict[int, dict[str, str]] = {0: {}}
    for name in tensors.keys() - base.keys():
        _, adapter, tensor = name.split(":", 2)
        versions.setdefault(version_of(adapter), {})[tensor] = tensors[name]
    return base, versions[max(versions)]


def drawn_adapter(model_path: Path, seed: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """An adapter of two modules of a model, of the ranks in PEFT's config, drawn from a seed."""
    import torch

    from engines.protocol.lora_config import rank_and_scale
    from rollout.weights.format.manifest import read_checkpoint_manifest

    manifest = read_checkpoint_manifest(model_path)
    assert manifest is not None
    make = torch.Generator().manual_seed(seed)
    named = {}
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        rows, columns = manifest.tensors[f"{layer}.weight"].shape
        rank, _ = rank_and_scale(config, layer)
        for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            name = f"base_model.model.{layer}.lora_{half}.weight"
            named[name] = torch.randn(shape, generator=make)
    return named


def merged_checkpoint(
    base: Path, adapter: Mapping[str, Any], settings: Mapping[str, Any], path: Path
) -> Path:
    """Base and adapter in one checkpoint, for transformers; made once."""
    from safetensors.torch import load_file, save_file

    from rollout.weights.tensors.adapters import merged

    if not path.exists():
        shutil.copytree(base, path)
        weights = load_file(base / "model.safetensors")
        tensors = {name: one.contiguous() for name, one in merged(weights, adapter, settings)}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def answers_on_every_path(
    policy: ServerHandle, named: Mapping[str, Any]
) -> dict[str, Sequence[Answer]]:
    """Greedy answers with their versions, by the path that the request took.

    Args:
        named: empty, or ``BASE``.
    """
    found: dict[str, Sequence[Answer]] = {}
    whole = policy.generate(_PROMPT, GREEDY, **named).result(60)
    *_, streamed = policy.stream(_PROMPT, GREEDY, **named)
    found["handle"], found["handle, streamed"] = [of_reply(whole)], [of_reply(streamed)]
    with rollout.Driver(policy.url, lambda sample: 0.0, **named) as driver:
        prompts = [rollout.Prompt(_PROMPT), rollout.Prompt(_OTHER)]
        groups = driver.rollout(0, prompts, group_size=1, sampling=GREEDY).result(60)
        found["driver"] = [of_reply(sample) for group in groups for sample in group.samples]
    found["session"] = _of_session(policy, named)
    with httpx.Client(base_url=policy.url, timeout=60, trust_env=False) as client:
        for path, body, headers in (
            ("one", {"input_ids": _PROMPT}, {}),
            ("failover", {"input_ids": _PROMPT}, {"x-token-failover": "on"}),
            ("streamed", {"input_ids": _PROMPT, "stream": True}, {}),
            ("two", {"input_ids": [_PROMPT, _OTHER]}, {}),
            ("two, streamed", {"input_ids": [_PROMPT, _OTHER], "stream": True}, {}),
        ):
            reply = _post(client, "/generate", _generate(**body, **named), headers)
            found[f"/generate, {path}"] = of_generate(reply)
        found["/v1/completions"] = _of_completion(client, named)
        found["/v1/chat/completions"] = _of_chat(client, named)
    return found


def of_mixed_list(policy: ServerHandle, adapter: str, **more: Any) -> tuple[list[Answer], ...]:
    """The base's answers and the adapter's, of one request for both."""
    body = _generate(
        input_ids=[_PROMPT, _OTHER, _PROMPT, _OTHER], lora_path=[None, None, adapter, adapter]
    )
    body["sampling_params"] = {**body["sampling_params"], "n": 2}
    with httpx.Client(base_url=policy.url, timeout=60, trust_env=False) as client:
        answers = of_generate(_post(client, "/generate", body | more, {}))
    assert len(answers) == 8
    return answers[:4], answers[4:]


def _generate(**fields: Any) -> dict[str, Any]:
    return {"sampling_params": GREEDY.to_wire(), "return_logprob": True, **fields}


def _post(
    client: httpx.Client, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> httpx.Response:
    reply = client.post(path, json=dict(body), headers=dict(headers))
    assert reply.status_code == 200, reply.text
    return reply


def of_generate(reply: httpx.Response) -> list[Answer]:
    """The answers in a reply of ``/generate``; of a stream, the last event of each."""
    if reply.headers["content-type"].startswith("text/event-stream"):
        lines = [line[5:].strip() for line in reply.text.splitlines() if line.startswith("data:")]
        last = {(one := json.loads(line)).get("index", 0): one for line in lines[:-1]}
        payloads = [last[index] for index in sorted(last)]
    else:
        parsed = reply.json()
        payloads = parsed if isinstance(parsed, list) else [parsed]
    for payload in payloads:
        spans = payload["meta_info"]["weight_versions"]
        assert payload["meta_info"]["weight_version"] == spans[-1]["version"]
    num_each = max(1, len(payloads) // 4)
    prompts = [_PROMPT, _OTHER] * 2
    return [Answer.of(prompts[at // num_each], one) for at, one in enumerate(payloads)]


def of_reply(one: Any) -> Answer:
    """A reply of a handle, or a sample."""
    return Answer(
        "",
        tuple(getattr(one, "prompt_ids", None) or _PROMPT),
        tuple(one.output_ids),
        tuple(one.output_logprobs),
        tuple(Span(int(span.version), span.start, span.end) for span in one.weight_versions),
        one.finish_reason.kind,
    )


def _of_ids(
    prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], version: str
) -> Answer:
    span = Span(int(version), 0, len(ids))
    return Answer("", tuple(prompt), tuple(ids), tuple(logprobs), (span,), "length")


def _of_session(policy: ServerHandle, named: Mapping[str, Any]) -> list[Answer]:
    """Of an agent with OpenAI's client: two turns."""
    import openai

    answers: list[Answer] = []
    with policy.session() as session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        create: Any = client.chat.completions.create
        history: list[Any] = list(_MESSAGES)
        for _ in range(2):
            options = {"model": "any", "temperature": 0, "max_tokens": NUM_TOKENS}
            reply = create(messages=history, extra_body={**named, "ignore_eos": True}, **options)
            history += [reply.choices[0].message, *_MESSAGES]
        known: list[int] = []
        for turn in session.turns().result(60):
            known += turn["prompt_ids"]
            ids, logprobs = turn["output_ids"], turn["output_logprobs"]
            (span,) = turn["weight_versions"]
            answers.append(_of_ids(known, ids, logprobs, span["version"]))
            known += ids
    return answers


def _of_completion(client: httpx.Client, named: Mapping[str, Any]) -> list[Answer]:
    body = {**_OPENAI, "prompt": _PROMPT, "logprobs": 0, "return_token_ids": True, **named}
    reply = _post(client, "/v1/completions", body, {})
    (choice,) = reply.json()["choices"]
    logprobs = choice["logprobs"]["token_logprobs"]
    return [_of_ids(_PROMPT, choice["token_ids"], logprobs, _version_of(reply))]


def _of_chat(client: httpx.Client, named: Mapping[str, Any]) -> list[Answer]:
    asked = {"return_token_ids": True, "return_meta_info": True, "logprobs": True}
    body = {**_OPENAI, "messages": _MESSAGES, **asked, **named}
    reply = _post(client, "/v1/chat/completions", body, {})
    (choice,) = reply.json()["choices"]
    logprobs = [one[0] for one in choice["meta_info"]["output_token_logprobs"]]
    prompt, ids = choice["prompt_token_ids"], choice["response_token_ids"]
    return [_of_ids(prompt, ids, logprobs, _version_of(reply))]


def _version_of(reply: httpx.Response) -> str:
    """From the header, which SGLang's own version must equal."""
    version = str(reply.headers["x-weight-version"])
    own = (reply.json().get("metadata") or {}).get("weight_version", version)
    assert own == version
    return version
