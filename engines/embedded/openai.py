"""OpenAI's ``/v1/completions`` and ``/v1/chat/completions``, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from engines.embedded import params as sampling
from engines.embedded.engine import Engine
from engines.embedded.errors import Invalid, Refusal, Unsupported, body
from engines.embedded.generation import Generation
from engines.embedded.info import served_name
from engines.embedded.params import Params
from engines.embedded.serving import (
    DONE,
    check_prompt,
    finish,
    follow,
    json_response,
    make_generations,
    new_rid,
    read_json,
    running,
    sse,
    with_room,
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
class Job:
    """One call: its generations, and how its answer is written."""

    id: str
    is_chat: bool
    generations: list[Generation]
    is_streamed: bool
    streams_usage: bool
    counts_as_it_goes: bool
    with_token_ids: bool
    with_meta_info: bool


def read_params(raw: dict[str, Any]) -> tuple[Params, bool]:
    """Sampling parameters, and whether the length was limited."""
    given: dict[str, Any] = {}
    for name, ours in _SAMPLING.items():
        if raw.get(name) is not None:
            given.setdefault(ours, raw[name])
    given.setdefault("max_new_tokens", None)
    return sampling.parse(given), given["max_new_tokens"] is not None


def read_chat(engine: Engine, raw: dict[str, Any]) -> Job:
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
    params = with_room(engine, params, len(ids), is_limited)
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


def read_completion(engine: Engine, raw: dict[str, Any]) -> Job:
    if raw.get("echo") or raw.get("suffix"):
        raise Unsupported("echo and suffix are not supported by the embedded engine")
    prompt = raw.get("prompt")
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if prompts and all(type(one) is int for one in prompts):
        prompts = [prompts]
    if not prompts:
        raise Invalid("the prompt is empty")
    encoded = [engine.text.encode(one) if isinstance(one, str) else one for one in prompts]
    ids = [check_prompt(engine, one) for one in encoded]
    params, _ = read_params({"max_tokens": _COMPLETION_TOKENS, **raw})
    return _job(engine, raw, ids, params, is_chat=False, logprobs=raw.get("logprobs") is not None)


def _job(
    engine: Engine,
    raw: dict[str, Any],
    prompts: list[list[int]],
    params: Params,
    *,
    is_chat: bool,
    logprobs: bool,
) -> Job:
    rid = raw.get("rid") or new_rid()
    is_streamed = bool(raw.get("stream"))
    options = raw.get("stream_options") or {}
    generations = [
        generation
        for index, ids in enumerate(prompts)
        for generation in make_generations(
            engine,
            rid if len(prompts) == 1 else f"{rid}_{index}",
            ids,
            params,
            return_logprob=logprobs,
            is_streamed=is_streamed,
            lora_name=_lora_name(engine, raw),
        )
    ]
    return Job(
        id=rid,
        is_chat=is_chat,
        generations=generations,
        is_streamed=is_streamed,
        streams_usage=bool(options.get("include_usage")),
        counts_as_it_goes=bool(options.get("continuous_usage_stats")),
        with_token_ids=bool(raw.get("return_token_ids")),
        with_meta_info=bool(raw.get("return_meta_info")),
    )


def _lora_name(engine: Engine, raw: dict[str, Any]) -> str | None:
    """SGLang's rule: an adapter is asked for as ``model:adapter``, else by ``lora_path``."""
    model, base = raw.get("model"), served_name(engine)
    if isinstance(model, str) and model.startswith(f"{base}:"):
        return model.removeprefix(f"{base}:").strip() or None
    name = raw.get("lora_path")
    if name is not None and not isinstance(name, str):
        raise Invalid(f"lora_path must be the name of one adapter: {name!r}")
    return name


async def chat_completions(engine: Engine, request: Request) -> Response:
    return await _serve(engine, request, read_chat(engine, await read_json(request)))


async def completions(engine: Engine, request: Request) -> Response:
    return await _serve(engine, request, read_completion(engine, await read_json(request)))


async def _serve(engine: Engine, request: Request, job: Job) -> Response:
    if job.is_streamed:
        return StreamingResponse(_stream(engine, request, job), media_type="text/event-stream")
    async with running(engine, request, job.generations):
        await finish(job.generations)
    choices = []
    for index, one in enumerate(job.generations):
        text = engine.text.completion(one.output_ids, one.params, one.finish_reason)
        choices.append(_choice(engine, job, index, text, 0, len(one.output_ids)))
    kind = "chat.completion" if job.is_chat else "text_completion"
    return json_response({**_head(engine, job, kind), "choices": choices, "usage": _usage(job)})


async def _stream(engine: Engine, request: Request, job: Job) -> AsyncIterator[bytes]:
    head = _head(engine, job, "chat.completion.chunk" if job.is_chat else "text_completion")
    sent = [""] * len(job.generations)
    counts = [0] * len(job.generations)
    try:
        async with running(engine, request, job.generations, watch=False):
            async for index, ids, text in follow(engine, job.generations):
                delta = text[len(sent[index]) :]
                choice = _choice(engine, job, index, delta, counts[index], len(ids), chunk=True)
                sent[index], counts[index] = text, len(ids)
                usage = {"usage": _usage(job, sum(counts))} if job.counts_as_it_goes else {}
                yield sse({**head, "choices": [choice], **usage})
        if job.streams_usage:
            yield sse({**head, "choices": [], "usage": _usage(job)})
    except Refusal as refusal:
        yield sse(body(str(refusal), refusal.status, refusal.kind))
    yield DONE


def _head(engine: Engine, job: Job, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl-" if job.is_chat else "cmpl-"
    return {
        "id": prefix + job.id,
        "object": kind,
        "created": int(time.time()),
        "model": served_name(engine),
    }


def _choice(
    engine: Engine,
    job: Job,
    index: int,
    text: str,
    first: int,
    end: int,
    *,
    chunk: bool = False,
) -> dict[str, Any]:
    """One choice, or the part of it from its token ``first`` up to ``end``; more may have come."""
    one = job.generations[index]
    reason = one.finish_reason
    choice: dict[str, Any] = {"index": index}
    if job.is_chat:
        message = {"role": "assistant", "content": text}
        choice["delta" if chunk else "message"] = message
    else:
        choice["text"] = text
    choice["logprobs"] = _logprobs(engine, job, one, first, end) if one.return_logprob else None
    choice["finish_reason"] = reason["type"] if reason else None
    choice["matched_stop"] = reason.get("matched") if reason else None
    if job.with_token_ids:
        choice["response_token_ids" if job.is_chat else "token_ids"] = one.output_ids[first:end]
        if not first:
            choice["prompt_token_ids"] = one.prompt_ids
    if job.with_meta_info:
        pairs = zip(one.logprobs, one.output_ids, strict=True)
        choice["meta_info"] = {"output_token_logprobs": [[*pair, None] for pair in pairs]}
    return choice


def _logprobs(engine: Engine, job: Job, one: Generation, first: int, end: int) -> dict[str, Any]:
    tokens = [engine.text.token(token_id) for token_id in one.output_ids[first:end]]
    values = one.logprobs[first:end]
    if not job.is_chat:
        # SGLang's form: it knows no offsets, and the list of what was not asked for is empty.
        offsets = [-1] * len(tokens)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "text_offset": offsets,
            "top_logprobs": [],
        }
    return {
        "content": [
            {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            for token, value in zip(tokens, values, strict=True)
        ]
    }


def _usage(job: Job, num_told: int | None = None) -> dict[str, Any]:
    prompts = {id(one.prompt_ids): one for one in job.generations}.values()
    prompt = sum(len(one.prompt_ids) for one in prompts)
    completion = num_told
    if completion is None:
        completion = sum(len(one.output_ids) for one in job.generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
    }
