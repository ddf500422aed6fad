"""SGLang's own ``/generate``: one prompt or a batch, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engines.embedded.core.errors import Invalid, Unsupported
from engines.embedded.generation import sampling_params as sampling
from engines.embedded.generation.generation import Generation
from engines.embedded.server.embedded_engine import EmbeddedEngine
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

# Fields of SGLang's request that would change the reply.
_UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "top_logprobs_num",
    "token_ids_logprob",
    "routed_experts_start_len",
    "return_indexer_topk",
    "return_hidden_states",
    "return_entropy",
    "return_text_in_logprobs",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_output_top_logprobs",
    "custom_logit_processor",
    "session_params",
    "watermark",
)


def _read(engine: EmbeddedEngine, raw: dict[str, Any]) -> tuple[list[Generation], bool]:
    """The generations of a call, and whether its reply is a list.

    Everything that can be checked is checked before anything is admitted.
    """
    for name in _UNSUPPORTED:
        if raw.get(name):
            raise Unsupported(f"{name} is not supported by the embedded engine")
    wants_experts = bool(raw.get("return_routed_experts"))
    if wants_experts and not engine.model.config.sparse_layers:
        raise Unsupported("return_routed_experts is not supported: this model has no experts")
    prompts, is_batch = _prompts(engine, raw)
    count = len(prompts)
    rids = _per_prompt(raw, "rid", count, is_batch)
    samplings = _per_prompt(raw, "sampling_params", count, is_batch)
    logprobs = _per_prompt(raw, "return_logprob", count, is_batch)
    starts = _per_prompt(raw, "logprob_start_len", count, is_batch)
    lora_names = _per_prompt(raw, "lora_path", count, is_batch)
    keys = _per_prompt(raw, "extra_key", count, is_batch)
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
            logprob_start_len=_start(starts[index], len(ids)),
            is_streamed=bool(raw.get("stream")),
            lora_name=lora_names[index],
            cache_key=keys[index],
            wants_experts=wants_experts,
            wants_masks=bool(raw.get("return_sampling_mask")),
        )
    return generations, is_list


def _start(value: Any, num_tokens: int) -> int:
    """From which prompt token on its log-probabilities are returned; -1 for none."""
    if value is None:
        return -1
    if type(value) is not int or not -1 <= value <= num_tokens:
        raise Invalid(f"logprob_start_len must be a whole number, -1 to {num_tokens}: {value!r}")
    return value


def _prompts(engine: EmbeddedEngine, raw: dict[str, Any]) -> tuple[list[list[int]], bool]:
    ids, text = raw.get("input_ids"), raw.get("text")
    if (ids is None) == (text is None):
        raise Invalid("give either text or input_ids")
    if isinstance(text, str):
        return [check_prompt(engine, engine.text.encode(text))], False
    values = text if ids is None else ids
    if not isinstance(values, list) or not values:
        raise Invalid("the prompt is empty" if values == [] else "a prompt has the wrong type")
    if ids is None:
        if not all(isinstance(value, str) for value in values):
            raise Invalid("text must be a string or a list of strings")
        values = [engine.text.encode(value) for value in values]
    is_batch = isinstance(values[0], list)
    return [check_prompt(engine, ids) for ids in (values if is_batch else [values])], is_batch


def _per_prompt(raw: dict[str, Any], name: str, count: int, is_batch: bool) -> list[Any]:
    """A value for each prompt: a list of a batch's length, or one value for all."""
    value = raw.get(name)
    if not isinstance(value, list):
        return [value] * count
    if not is_batch or len(value) != count:
        raise Invalid(f"{name} is a list of {len(value)} for {count} prompts")
    return value


def _reply(
    engine: EmbeddedEngine, generation: Generation, ids: list[int], text: str
) -> dict[str, Any]:
    meta_info = generation.meta_info(ids, engine.weight_version)
    return {"text": text, "output_ids": ids, "meta_info": meta_info}


async def generate(engine: EmbeddedEngine, request: Request) -> Response:
    raw = await read_json(request)
    generations, is_list = _read(engine, raw)
    if raw.get("stream"):
        return event_stream(_chunks(engine, generations, is_list))
    texts = await complete(engine, request, generations)
    replies = [
        _reply(engine, generation, generation.output_ids, text)
        for generation, text in zip(generations, texts, strict=True)
    ]
    return json_response(replies if is_list else replies[0])


async def _chunks(
    engine: EmbeddedEngine, generations: list[Generation], is_list: bool
) -> AsyncGenerator[dict[str, Any], None]:
    async for index, ids, text in follow(engine, generations):
        chunk = _reply(engine, generations[index], ids, text)
        yield {**chunk, "index": index} if is_list else chunk
