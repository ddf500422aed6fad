"""OpenAI's ``/v1/completions`` and ``/v1/chat/completions``, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engines.embedded.core.errors import Invalid, Unsupported
from engines.embedded.generation import sampling_params as sampling
from engines.embedded.generation.generation import Generation
from engines.embedded.generation.sampling_params import Params
from engines.embedded.server.embedded_engine import EmbeddedEngine
from engines.embedded.server.info_api import served_name
from engines.embedded.server.request_runner import (
    check_prompt,
    complete,
    event_stream,
    follow,
    json_response,
    make_generations,
    new_rid,
    read_json,
)

# OpenAI's and SGLang's names on the left, sampling_params' on the right.
_SAMPLING = {
    "max_completion_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "skip_special_tokens",
            "no_stop_trim",
            "n",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "logit_bias",
        )
    },
}
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """One call: its generations, and the form of its reply."""

    id: str
    is_chat: bool
    generations: list[Generation]
    raw: dict[str, Any]
    stream_options: dict[str, Any]


def read_params(raw: dict[str, Any]) -> tuple[Params, bool]:
    """Sampling parameters, and whether the length was limited."""
    given: dict[str, Any] = {}
    for name, ours in _SAMPLING.items():
        if raw.get(name) is not None:
            given.setdefault(ours, raw[name])
    given.setdefault("max_new_tokens", None)
    return sampling.parse(given), given["max_new_tokens"] is not None


def read_chat(engine: EmbeddedEngine, raw: dict[str, Any]) -> CompletionJob:
    messages = raw.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Invalid("messages must be a list of at least one message")
    unstreamed = [name for name in ("return_token_ids", "return_meta_info") if raw.get(name)]
    if raw.get("stream") and unstreamed:
        raise Invalid(f"{unstreamed[0]} is not supported with streaming; set stream to false")
    if raw.get("top_logprobs"):
        raise Unsupported("top_logprobs are not computed by the embedded engine")
    options = {"tools": raw.get("tools"), **(raw.get("chat_template_kwargs") or {})}
    plain = [_plain(message) for message in messages]
    begun = ""
    if raw.get("continue_final_message") and plain[-1]["role"] == "assistant":
        begun = str(plain.pop().get("content") or "")
    ids = engine.text.apply_chat_template(plain, options)
    if begun:
        ids = ids + engine.text.encode(begun, add_special_tokens=False)
    ids = check_prompt(engine, ids)
    params, is_limited = read_params(raw)
    if not is_limited:  # OpenAI's rule: a completion may fill the context
        params = replace(params, max_new_tokens=max(0, engine.context_length - len(ids)))
    return _job(engine, raw, [ids], params, is_chat=True, logprobs=bool(raw.get("logprobs")))


def _plain(message: Any) -> dict[str, Any]:
    """A message whose content is text: OpenAI also allows a list of parts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Invalid("a message must have a role and a content")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
        raise Unsupported("only text parts are supported in a message's content")
    return {**message, "content": "".join(str(part.get("text", "")) for part in content)}


def read_completion(engine: EmbeddedEngine, raw: dict[str, Any]) -> CompletionJob:
    if raw.get("echo") or raw.get("suffix"):
        raise Unsupported("echo and suffix are not supported by the embedded engine")
    prompt = raw.get("prompt")
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if prompts and all(type(prompt) is int for prompt in prompts):
        prompts = [prompts]
    if not prompts:
        raise Invalid("the prompt is empty")
    encoded = [
        engine.text.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
    ]
    ids = [check_prompt(engine, prompt) for prompt in encoded]
    params, _ = read_params({"max_tokens": _COMPLETION_TOKENS, **raw})
    return _job(engine, raw, ids, params, is_chat=False, logprobs=raw.get("logprobs") is not None)


def _job(
    engine: EmbeddedEngine,
    raw: dict[str, Any],
    prompts: list[list[int]],
    params: Params,
    *,
    is_chat: bool,
    logprobs: bool,
) -> CompletionJob:
    rid = raw.get("rid") or new_rid()
    generations = [
        generation
        for index, ids in enumerate(prompts)
        for generation in make_generations(
            engine,
            rid if len(prompts) == 1 else f"{rid}_{index}",
            ids,
            params,
            return_logprob=logprobs,
            is_streamed=bool(raw.get("stream")),
            lora_name=_lora_name(engine, raw),
            cache_key=raw.get("extra_key"),
        )
    ]
    stream_options = raw.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise Invalid("stream_options must be an object")
    return CompletionJob(rid, is_chat, generations, raw, stream_options)


def _lora_name(engine: EmbeddedEngine, raw: dict[str, Any]) -> str | None:
    """SGLang's rule: an adapter is requested as ``model:adapter``, else by ``lora_path``."""
    model, base = raw.get("model"), served_name(engine)
    if isinstance(model, str) and model.startswith(f"{base}:"):
        return model.removeprefix(f"{base}:").strip() or None
    name = raw.get("lora_path")
    if name is not None and not isinstance(name, str):
        raise Invalid(f"lora_path must be the name of one adapter: {name!r}")
    return name


async def chat_completions(engine: EmbeddedEngine, request: Request) -> Response:
    return await _serve(engine, request, read_chat(engine, await read_json(request)))


async def completions(engine: EmbeddedEngine, request: Request) -> Response:
    return await _serve(engine, request, read_completion(engine, await read_json(request)))


async def _serve(engine: EmbeddedEngine, request: Request, job: CompletionJob) -> Response:
    if job.raw.get("stream"):
        return event_stream(_chunks(engine, job))
    texts = await complete(engine, request, job.generations)
    choices = [
        _choice(engine, job, index, text, 0, len(job.generations[index].output_ids))
        for index, text in enumerate(texts)
    ]
    kind = "chat.completion" if job.is_chat else "text_completion"
    return json_response({**_head(engine, job, kind), "choices": choices, "usage": _usage(job)})


async def _chunks(
    engine: EmbeddedEngine, job: CompletionJob
) -> AsyncGenerator[dict[str, Any], None]:
    head = _head(engine, job, "chat.completion.chunk" if job.is_chat else "text_completion")
    sent = [""] * len(job.generations)
    counts = [0] * len(job.generations)
    counts_as_it_goes = job.stream_options.get("continuous_usage_stats")
    async for index, ids, text in follow(engine, job.generations):
        delta = text[len(sent[index]) :]
        choice = _choice(engine, job, index, delta, counts[index], len(ids), chunk=True)
        sent[index], counts[index] = text, len(ids)
        usage = {"usage": _usage(job, sum(counts))} if counts_as_it_goes else {}
        yield {**head, "choices": [choice], **usage}
    if job.stream_options.get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(job)}


def _head(engine: EmbeddedEngine, job: CompletionJob, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl-" if job.is_chat else "cmpl-"
    return {
        "id": prefix + job.id,
        "object": kind,
        "created": int(time.time()),
        "model": served_name(engine),
    }


def _choice(
    engine: EmbeddedEngine,
    job: CompletionJob,
    index: int,
    text: str,
    first: int,
    end: int,
    *,
    chunk: bool = False,
) -> dict[str, Any]:
    """One choice, or the part of it from its token ``first`` up to ``end`` of more."""
    generation = job.generations[index]
    reason = generation.finish_reason
    choice: dict[str, Any] = {"index": index}
    if job.is_chat:
        message = {"role": "assistant", "content": text}
        choice["delta" if chunk else "message"] = message
    else:
        choice["text"] = text
    choice["logprobs"] = (
        _logprobs(engine, job, generation, first, end) if generation.return_logprob else None
    )
    choice["finish_reason"] = reason["type"] if reason else None
    choice["matched_stop"] = reason.get("matched") if reason else None
    if job.raw.get("return_token_ids"):
        name = "response_token_ids" if job.is_chat else "token_ids"
        choice[name] = generation.output_ids[first:end]
        if not first:
            choice["prompt_token_ids"] = generation.prompt_ids
    if job.raw.get("return_meta_info"):
        pairs = zip(generation.logprobs, generation.output_ids, strict=True)
        choice["meta_info"] = {"output_token_logprobs": [[*pair, None] for pair in pairs]}
    return choice


def _logprobs(
    engine: EmbeddedEngine, job: CompletionJob, generation: Generation, first: int, end: int
) -> dict[str, Any]:
    tokens = [engine.text.token(token_id) for token_id in generation.output_ids[first:end]]
    values = generation.logprobs[first:end]
    if not job.is_chat:
        # SGLang's form: it has no offsets, and lists that were not requested are empty.
        offsets = {"text_offset": [-1] * len(tokens)}
        return {"tokens": tokens, "token_logprobs": values, **offsets, "top_logprobs": []}
    return {
        "content": [
            {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            for token, value in zip(tokens, values, strict=True)
        ]
    }


def _usage(job: CompletionJob, num_sent: int | None = None) -> dict[str, Any]:
    prompts = {id(generation.prompt_ids): generation for generation in job.generations}.values()
    prompt = sum(len(generation.prompt_ids) for generation in prompts)
    num_cached = sum(generation.cached_tokens for generation in prompts)
    completion = num_sent
    if completion is None:
        completion = sum(len(generation.output_ids) for generation in job.generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
