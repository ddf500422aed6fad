"""From a request's values to running generations, for the native and the OpenAI endpoints."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from engines.embedded.engine import Engine
from engines.embedded.errors import Invalid
from engines.embedded.generation import Generation
from engines.embedded.params import Params
from engines.embedded.text import StreamText

_run_id = uuid.uuid4().hex[:12]
_counter = itertools.count()


def new_rid() -> str:
    return f"{_run_id}-{next(_counter):x}"


async def read_json(request: Request, *, is_optional: bool = False) -> dict[str, Any]:
    """The request's body, which must be a JSON object (SGLang wants at least ``{}``)."""
    content = await request.body()
    if not content and is_optional:
        return {}
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


def sse(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def check_prompt(engine: Engine, ids: Any) -> list[int]:
    """A prompt's token ids, refused where SGLang would end or answer garbage."""
    if not isinstance(ids, list) or not {*map(type, ids)} <= {int}:
        raise Invalid("a prompt must be a list of token ids")
    if not ids:
        raise Invalid("the prompt is empty")
    size = engine.text.vocabulary_size
    if min(ids) < 0 or max(ids) >= size:
        wrong = next(one for one in ids if not 0 <= one < size)
        raise Invalid(f"token id {wrong} is not in the vocabulary of {size}")
    return ids


def make_generations(
    engine: Engine,
    rid: str,
    prompt_ids: list[int],
    params: Params,
    *,
    return_logprob: bool = False,
    logprob_start_len: int = -1,
    is_streamed: bool = False,
    lora_name: str | None = None,
) -> list[Generation]:
    """One generation per wanted completion.  Several get ids ``rid_0``, ``rid_1`` ... and, if
    seeded, consecutive seeds."""
    total = len(prompt_ids) + params.max_new_tokens
    if total > engine.context_length:
        raise Invalid(
            f"prompt of {len(prompt_ids)} tokens plus max_new_tokens {params.max_new_tokens} is "
            f"{total}, more than the context length of {engine.context_length}"
        )
    adapter = engine.adapters.find(lora_name)
    eos_ids = frozenset() if params.ignore_eos else engine.text.eos_ids
    seed = params.sampling_seed
    return [
        Generation(
            rid if params.n == 1 else f"{rid}_{index}",
            prompt_ids,
            params,
            stop_ids=params.stop_token_ids | eos_ids,
            find_stop=engine.text.stop_finder(params),
            seed=None if seed is None else seed + index,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            is_streamed=is_streamed,
            adapter=adapter,
        )
        for index in range(params.n)
    ]


def with_room(engine: Engine, params: Params, num_prompt_tokens: int, is_set: bool) -> Params:
    """OpenAI's rule: without a limit a completion may fill the context."""
    if is_set:
        return params
    return replace(params, max_new_tokens=max(0, engine.context_length - num_prompt_tokens))


@asynccontextmanager
async def running(
    engine: Engine, request: Request, generations: Sequence[Generation], *, watch: bool = True
) -> AsyncIterator[None]:
    """The generations are live inside; whatever ends it, none runs on for nobody.

    ``watch`` for the client to go away; a streaming response does so itself."""
    engine.submit(generations)
    watcher = asyncio.create_task(_watch(engine, request, generations)) if watch else None
    try:
        yield
    finally:
        if watcher is not None:
            watcher.cancel()
        engine.drop(generations)


async def _watch(engine: Engine, request: Request, generations: Sequence[Generation]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    engine.drop(generations)


async def finish(generations: Sequence[Generation]) -> None:
    """Wait for all; raise the refusal of any that was not admitted."""
    for generation in generations:
        while not generation.is_over:
            await generation.wait()
    for generation in generations:
        if generation.refusal is not None:
            raise generation.refusal


async def follow(
    engine: Engine, generations: Sequence[Generation]
) -> AsyncIterator[tuple[int, list[int], str]]:
    """(index, token ids so far, their text) at every change of any, up to each one's end.

    Raises:
        Refusal: one of them was not admitted.
    """
    texts = [StreamText(engine.text, one.params) for one in generations]
    async for index, ids in _changes(generations):
        one = generations[index]
        if one.refusal is not None:
            raise one.refusal
        if one.is_over:
            whole = one.output_ids
            yield index, whole, engine.text.completion(whole, one.params, one.finish_reason)
        else:
            yield index, ids, texts[index].update(ids)


async def _changes(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, list[int]]]:
    queue: asyncio.Queue[tuple[int, list[int]] | None] = asyncio.Queue()

    async def watch(index: int, generation: Generation) -> None:
        seen = -1
        while True:
            is_over, ids = generation.is_over, generation.output_ids[:]
            if is_over or len(ids) > max(seen, 0):
                seen = len(ids)
                queue.put_nowait((index, ids))
            if is_over:
                queue.put_nowait(None)
                return
            await generation.wait()

    tasks = [asyncio.create_task(watch(*pair)) for pair in enumerate(generations)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
