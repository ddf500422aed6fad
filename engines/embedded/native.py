"""SGLang's own ``/generate``: one prompt or a batch, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from engines.embedded import params as sampling
from engines.embedded.engine import Engine
from engines.embedded.errors import Invalid, Refusal, Unsupported, body
from engines.embedded.generation import Generation
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
)

# Fields of SGLang's request that ask for something else than text from text.
_UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "top_logprobs_num",
    "token_ids_logprob",
)


@dataclass(frozen=True, slots=True)
class Job:
    """What one call of ``/generate`` asks for; ``is_list`` decides the answer's shape."""

    generations: list[Generation]
    is_list: bool
    is_streamed: bool


def read(engine: Engine, raw: dict[str, Any]) -> Job:
    """Check everything that can be checked before anything is admitted."""
    for name in _UNSUPPORTED:
        if raw.get(name):
            raise Unsupported(f"{name} is not supported by the embedded engine")
    prompts, is_batch = _prompts(engine, raw)
    count = len(prompts)
    rids = _per_prompt(raw.get("rid"), count, is_batch, "rid")
    samplings = _per_prompt(raw.get("sampling_params"), count, is_batch, "sampling_params")
    logprobs = _per_prompt(raw.get("return_logprob"), count, is_batch, "return_logprob")
    starts = _per_prompt(raw.get("logprob_start_len"), count, is_batch, "logprob_start_len")
    lora_names = _per_prompt(raw.get("lora_path"), count, is_batch, "lora_path")
    is_streamed = bool(raw.get("stream"))
    generations: list[Generation] = []
    is_list = is_batch
    for index, ids in enumerate(prompts):
        params = sampling.parse(samplings[index])
        is_list = is_list or params.n > 1
        rid = rids[index] or new_rid()
        if is_batch and isinstance(raw.get("rid"), str):
            rid = f"{rid}_{index}"
        generations += make_generations(
            engine,
            rid,
            ids,
            params,
            return_logprob=bool(logprobs[index]),
            logprob_start_len=_start(engine, starts[index], len(ids)),
            is_streamed=is_streamed,
            lora_name=lora_names[index],
        )
    return Job(generations, is_list, is_streamed)


def _start(engine: Engine, value: Any, num_tokens: int) -> int:
    """From which prompt token on its log-probabilities are wanted; -1 for none."""
    if value is None:
        return -1
    if type(value) is not int or not -1 <= value <= num_tokens:
        raise Invalid(f"logprob_start_len must be a whole number, -1 to {num_tokens}: {value!r}")
    if value >= 0 and not engine.batcher.can_score:
        raise Unsupported("logprob_start_len: not computed for a model with sliding windows")
    return value


def _prompts(engine: Engine, raw: dict[str, Any]) -> tuple[list[list[int]], bool]:
    ids, text = raw.get("input_ids"), raw.get("text")
    if (ids is None) == (text is None):
        raise Invalid("give either text or input_ids")
    values = text if ids is None else ids
    if ids is None and isinstance(values, str):
        return [check_prompt(engine, engine.text.encode(values))], False
    if not isinstance(values, list) or not values:
        raise Invalid("the prompt is empty" if values == [] else "a prompt has the wrong type")
    if ids is None:
        if not all(isinstance(one, str) for one in values):
            raise Invalid("text must be a string or a list of strings")
        return [check_prompt(engine, engine.text.encode(one)) for one in values], True
    if isinstance(values[0], list):
        return [check_prompt(engine, one) for one in values], True
    return [check_prompt(engine, values)], False


def _per_prompt(value: Any, count: int, is_batch: bool, name: str) -> list[Any]:
    """A value for each prompt: a list of a batch's length, or one value for all."""
    if not isinstance(value, list):
        return [value] * count
    if not is_batch or len(value) != count:
        raise Invalid(f"{name} is a list of {len(value)} for {count} prompts")
    return value


def reply(engine: Engine, generation: Generation, ids: list[int], text: str) -> dict[str, Any]:
    return {
        "text": text,
        "output_ids": ids,
        "meta_info": generation.meta_info(ids, engine.weight_version),
    }


async def generate(engine: Engine, request: Request) -> Response:
    """The endpoint."""
    job = read(engine, await read_json(request))
    if job.is_streamed:
        return StreamingResponse(_stream(engine, request, job), media_type="text/event-stream")
    async with running(engine, request, job.generations):
        await finish(job.generations)
    replies = [
        reply(
            engine,
            one,
            one.output_ids,
            engine.text.completion(one.output_ids, one.params, one.finish_reason),
        )
        for one in job.generations
    ]
    return json_response(replies if job.is_list else replies[0])


async def _stream(engine: Engine, request: Request, job: Job) -> AsyncIterator[bytes]:
    try:
        async with running(engine, request, job.generations, watch=False):
            async for index, ids, text in follow(engine, job.generations):
                chunk = reply(engine, job.generations[index], ids, text)
                yield sse({**chunk, "index": index} if job.is_list else chunk)
    except Refusal as refusal:
        yield sse(body(str(refusal), refusal.status, refusal.kind))
    yield DONE
