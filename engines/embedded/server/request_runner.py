"""Run the generations of a request, for the native and the OpenAI endpoints."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from engines.embedded.core.errors import EngineRefusal, Invalid
from engines.embedded.generation.generation import Generation
from engines.embedded.generation.sampling_params import Params
from engines.embedded.generation.tokenization import StreamText
from engines.embedded.server.embedded_engine import EmbeddedEngine
from engines.process.background import Then, keep_task

_run_id = uuid.uuid4().hex[:12]
_counter = itertools.count()


def new_rid() -> str:
    return f"{_run_id}-{next(_counter):x}"


async def read_json(request: Request, *, is_optional: bool = False) -> dict[str, Any]:
    """The request's body, which must be a JSON object (SGLang wants at least ``{}``)."""
    content = await request.body()
    return {} if is_optional and not content else object_in(content)


def object_in(content: bytes) -> dict[str, Any]:
    """The JSON object of a body; ``Invalid`` if it is none."""
    try:
        value = orjson.loads(content)
    except ValueError as error:
        raise Invalid(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Invalid("the body is not a JSON object")
    return value


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def json_response(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


def event_stream(chunks: AsyncGenerator[Any, None]) -> Response:
    """A reply of server-sent events: the chunks, or a refusal in their place."""

    async def events() -> AsyncIterator[bytes]:
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield b"data: " + dumps(chunk) + b"\n\n"
        except EngineRefusal as refusal:
            yield b"data: " + dumps(refusal.body()) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def check_prompt(engine: EmbeddedEngine, ids: Any) -> list[int]:
    """Check a prompt's token ids; invalid ones end SGLang or make it return garbage."""
    if not isinstance(ids, list) or not {*map(type, ids)} <= {int}:
        raise Invalid("a prompt must be a list of token ids")
    if not ids:
        raise Invalid("the prompt is empty")
    size = engine.text.vocabulary_size
    if min(ids) < 0 or max(ids) >= size:
        wrong = next(token for token in ids if not 0 <= token < size)
        raise Invalid(f"token id {wrong} is not in the vocabulary of {size}")
    return ids


def make_generations(
    engine: EmbeddedEngine,
    rid: str,
    prompt_ids: list[int],
    params: Params,
    *,
    return_logprob: bool = False,
    logprob_start_len: int = -1,
    is_streamed: bool = False,
    lora_name: str | None = None,
    cache_key: Any = None,
    wants_experts: bool = False,
    wants_masks: bool = False,
) -> list[Generation]:
    """One generation per wanted completion.  Several get ids ``rid_0``, ``rid_1`` ... and, if
    seeded, consecutive seeds."""
    total = len(prompt_ids) + params.max_new_tokens
    if total > engine.context_length:
        raise Invalid(
            f"prompt of {len(prompt_ids)} tokens plus max_new_tokens {params.max_new_tokens} is "
            f"{total}, more than the context length of {engine.context_length}"
        )
    if not isinstance(cache_key, str | None):
        raise Invalid(f"extra_key must be a text: {cache_key!r}")
    adapter = engine.adapters.find(lora_name)
    ends = params.stop_token_ids | engine.text.eos_ids
    seed = params.sampling_seed
    return [
        Generation(
            rid if params.n == 1 else f"{rid}_{index}",
            prompt_ids,
            params,
            stop_ids=params.stop_token_ids if params.ignore_eos else ends,
            early_ids=ends,
            find_stop=engine.text.stop_finder(params),
            seed=None if seed is None else seed + index,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            is_streamed=is_streamed,
            adapter=adapter,
            cache_key=cache_key or "",
            wants_experts=wants_experts,
            wants_masks=wants_masks,
        )
        for index in range(params.n)
    ]


async def complete(
    engine: EmbeddedEngine, request: Request, generations: Sequence[Generation]
) -> list[str]:
    """Run the generations to their ends, or until the client disconnects; returns their texts.

    Raises:
        EngineRefusal: one of them was not admitted.
    """
    engine.submit(generations)
    watcher = keep_task(
        partial(_drop_at_disconnect, engine, request, generations), "client", Then.IS_OVER
    )
    try:
        for generation in generations:
            while not generation.is_over:
                await generation.wait()
    finally:
        watcher.cancel()
        engine.drop(generations)
    for generation in generations:
        if generation.refusal is not None:
            raise generation.refusal
    return [engine.text.completion(generation) for generation in generations]


async def _drop_at_disconnect(
    engine: EmbeddedEngine, request: Request, generations: Sequence[Generation]
) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    engine.drop(generations)


async def follow(
    engine: EmbeddedEngine, generations: Sequence[Generation]
) -> AsyncIterator[tuple[int, list[int], str]]:
    """Run the generations; (index, token ids so far, their text) at every change of each.

    Raises:
        EngineRefusal: one of them was not admitted.
    """
    queue: asyncio.Queue[tuple[int, list[int] | None]] = asyncio.Queue()

    async def watch(index: int, generation: Generation) -> None:
        num_seen = 0
        try:
            while not generation.is_over:
                ids = generation.output_ids[:]
                if len(ids) > num_seen:
                    num_seen = len(ids)
                    queue.put_nowait((index, ids))
                await generation.wait()
            queue.put_nowait((index, generation.output_ids))
        finally:
            queue.put_nowait((index, None))

    engine.submit(generations)
    texts = [StreamText(engine.text, generation.params) for generation in generations]
    tasks = [
        keep_task(partial(watch, *pair), "generation", Then.IS_OVER)
        for pair in enumerate(generations)
    ]
    num_running = len(tasks)
    try:
        while num_running:
            index, ids = await queue.get()
            generation = generations[index]
            if ids is None:
                num_running -= 1
            elif generation.refusal is not None:
                raise generation.refusal
            elif generation.is_over:
                yield index, generation.output_ids, engine.text.completion(generation)
            else:
                yield index, ids, texts[index].update(ids)
    finally:
        for task in tasks:
            task.cancel()
        engine.drop(generations)
