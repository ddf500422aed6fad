"""/generate: what comes out, how it is drawn, how it ends."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from tests.engines.embedded import reference
from tests.engines.embedded.engine_client import PROMPT, Asker, sampling

pytestmark = pytest.mark.embedded

ROUNDING = 1e-3
"""Nats.  Of 250 replies the largest difference was 2e-5 in half and 8e-5 in one; another model or
temperature is tenths away."""


def some_prompts(count: int, longest: int = 60) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(256) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


async def test_greedy_output_equals_that_of_generate(
    engine: Asker, models: dict[str, Path]
) -> None:
    reply = await engine.generate()
    assert reply["output_ids"] == reference.greedy(models["first"], PROMPT)
    assert reply["meta_info"]["prompt_tokens"] == len(PROMPT)
    assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])
    assert reply["meta_info"]["weight_version"] == "0"


async def test_a_second_architecture_with_tied_embeddings_equals_generate_too(
    backed: Asker, models: dict[str, Path]
) -> None:
    reply = await backed.generate()
    assert reply["output_ids"] == reference.greedy(models["qwen"], PROMPT)


async def test_requests_at_once_answer_as_each_does_alone(
    engine: Asker, models: dict[str, Path]
) -> None:
    # One is longer than a step takes, so its prompt is split over steps with the others.
    prompts = [*some_prompts(24), [7, 8, 9] * 1000]
    replies = await asyncio.gather(*(engine.generate(prompt) for prompt in prompts))
    expected = [reference.greedy(models["first"], prompt) for prompt in prompts]
    assert [reply["output_ids"] for reply in replies] == expected


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_a_forward_pass_at_the_temperature(
    engine: Asker, models: dict[str, Path], temperature: float
) -> None:
    reply = await engine.generate(temperature=temperature, top_k=20, return_logprob=True)
    triples = reply["meta_info"]["output_token_logprobs"]
    assert [triple[1] for triple in triples] == reply["output_ids"]
    expected = reference.logprobs(models["first"], PROMPT, reply["output_ids"], temperature)
    assert [triple[0] for triple in triples] == pytest.approx(expected, abs=ROUNDING)


async def test_a_batch_is_answered_in_order(engine: Asker, models: dict[str, Path]) -> None:
    prompts = some_prompts(3)
    replies = await engine.generate(prompts, rid="batch")
    assert [reply["meta_info"]["id"] for reply in replies] == ["batch_0", "batch_1", "batch_2"]
    expected = [reference.greedy(models["first"], prompt) for prompt in prompts]
    assert [reply["output_ids"] for reply in replies] == expected


async def test_several_samples_of_one_prompt_differ(engine: Asker) -> None:
    replies = await engine.generate(n=4, temperature=1.0, ignore_eos=True, rid="many")
    assert [reply["meta_info"]["id"] for reply in replies] == [f"many_{i}" for i in range(4)]
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 4


async def test_text_is_tokenized_and_text_comes_back(engine: Asker) -> None:
    reply = await engine.generate(text="Once upon a time")
    assert reply["meta_info"]["prompt_tokens"] == len("Once upon a time")
    assert isinstance(reply["text"], str)


async def test_a_stop_string_ends_the_text_before_it(engine: Asker) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
    whole = await engine.generate(**options, max_new_tokens=40)
    stop = next(
        whole["text"][i : i + 2]
        for i in range(5, 30)
        if whole["text"][i : i + 2].isascii() and whole["text"][i : i + 2] in whole["text"]
    )
    reply = await engine.generate(**options, max_new_tokens=40, stop=[stop, "never said"])
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["text"] == whole["text"][: whole["text"].index(stop)]
    assert reply["output_ids"] == whole["output_ids"][: len(reply["output_ids"])]


async def test_a_stop_token_ends_the_ids_with_it_and_not_before_the_minimum(engine: Asker) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
    whole = (await engine.generate(**options))["output_ids"]
    reply = await engine.generate(**options, stop_token_ids=[whole[2]])
    end = whole.index(whole[2]) + 1
    assert reply["output_ids"] == whole[:end]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": whole[2]}
    later = await engine.generate(**options, stop_token_ids=[whole[2]], min_new_tokens=10)
    assert later["meta_info"]["completion_tokens"] >= 10


async def test_the_length_limit_ends_it(engine: Asker) -> None:
    reply = await engine.generate(max_new_tokens=3, ignore_eos=True)
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert (await engine.generate(max_new_tokens=0))["output_ids"] == []


async def test_a_seeded_request_repeats_whatever_else_runs(engine: Asker) -> None:
    seeded: dict[str, Any] = {"temperature": 1.0, "sampling_seed": 11, "top_p": 0.9}
    alone = await engine.generate(**seeded)
    others = [engine.generate(prompt, temperature=1.0) for prompt in some_prompts(12)]
    together = await asyncio.gather(engine.generate(**seeded), *others)
    assert together[0]["output_ids"] == alone["output_ids"]
    other_seed = await engine.generate(**{**seeded, "sampling_seed": 12})
    assert other_seed["output_ids"] != alone["output_ids"]


async def test_a_seeded_request_goes_on_from_its_tokens_as_if_it_had_not_ended(
    engine: Asker,
) -> None:
    seeded: dict[str, Any] = {"temperature": 1.0, "sampling_seed": 11, "ignore_eos": True}
    whole = (await engine.generate(**seeded, max_new_tokens=24))["output_ids"]
    for num in (1, 9, 23):
        prompt = [*PROMPT, *whole[:num]]
        rest = await engine.generate(prompt, **seeded, max_new_tokens=24 - num)
        assert rest["output_ids"] == whole[num:]


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}])
async def test_a_distribution_cut_to_its_likeliest_is_greedy(
    engine: Asker, models: dict[str, Path], cut: dict[str, Any]
) -> None:
    reply = await engine.generate(temperature=1.0, **cut)
    assert reply["output_ids"] == reference.greedy(models["first"], PROMPT)


async def test_a_stream_is_cumulative_and_ends_as_the_whole_answer(engine: Asker) -> None:
    whole = await engine.generate(ignore_eos=True)
    async with engine.in_flight(max_new_tokens=16) as stream:
        lengths = [len(stream.last["output_ids"])]
        while await stream.next() is not None:
            lengths.append(len(stream.last["output_ids"]))
        assert stream.last["output_ids"] == whole["output_ids"]
        assert stream.last["text"] == whole["text"]
        assert stream.last["meta_info"]["finish_reason"]["type"] == "length"
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 2


async def test_a_repeated_prompt_is_read_from_the_prefix_cache_until_it_is_flushed(
    engine: Asker,
) -> None:
    prompt = [1, 2, 3, 4] * 20
    assert (await engine.generate(prompt))["meta_info"]["cached_tokens"] == 0
    assert (await engine.generate(prompt))["meta_info"]["cached_tokens"] == 64
    await engine.post("/flush_cache")
    assert (await engine.generate(prompt))["meta_info"]["cached_tokens"] == 0


async def test_a_prefix_is_found_only_with_the_key_that_cached_it(engine: Asker) -> None:
    """As in SGLang: the sentinel's request past the caches has a key of its own."""
    prompt = [4, 3, 2, 1] * 20

    async def num_cached(key: str | None) -> int:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, "extra_key": key}
        return int((await engine.post("/generate", **body))["meta_info"]["cached_tokens"])

    assert [await num_cached(key) for key in ("a", "b", None)] == [0, 0, 0]
    assert [await num_cached(key) for key in ("a", "b", None)] == [64, 64, 64]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": [1], "extra_key": 5}, "extra_key"),
    ({"input_ids": []}, "empty"),
    ({"input_ids": [1, 99999]}, "99999"),
    ({"input_ids": [1, -1]}, "-1"),
    ({"input_ids": [1, "a"]}, "token ids"),
    ({"text": ""}, "empty"),
    ({}, "either text or input_ids"),
    ({"input_ids": [1] * 4000, "sampling_params": sampling(max_new_tokens=97)}, "context length"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
    ({"input_ids": [1], "sampling_params": {"nonsense": 1}}, "nonsense"),
    ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "Duplicate"),
    ({"input_ids": [[1], []]}, "empty"),
]


@pytest.mark.parametrize(("body", "words"), WRONG)
async def test_a_wrong_request_is_a_400_that_says_why(
    engine: Asker, body: dict[str, Any], words: str
) -> None:
    assert words in await engine.refused(400, "/generate", **body)
    assert (await engine.generate(rid="a"))["output_ids"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_logprobs_num", 2), ("return_routed_experts", True), ("image_data", "a.png")],
)
async def test_what_is_not_supported_is_a_501_and_not_ignored(
    engine: Asker, field: str, value: Any
) -> None:
    assert field in await engine.refused(501, "/generate", input_ids=PROMPT, **{field: value})


@pytest.mark.parametrize("start", [0, 5])
async def test_logprobs_of_a_prompt_are_those_of_a_forward_pass(
    engine: Asker, models: dict[str, Path], start: int
) -> None:
    # The second time the prompt is in the cache, and is computed all the same.
    for _ in range(2):
        reply = await engine.generate(
            max_new_tokens=1, temperature=0, return_logprob=True, logprob_start_len=start
        )
        triples = reply["meta_info"]["input_token_logprobs"]
        assert [triple[1] for triple in triples] == PROMPT[start:]
        assert triples[0][0] is None
        before, after = PROMPT[: start + 1], PROMPT[start + 1 :]
        expected = reference.logprobs(models["first"], before, after, 1.0)
        assert [triple[0] for triple in triples[1:]] == pytest.approx(expected, abs=ROUNDING)


async def test_logprobs_of_a_prompt_from_beyond_its_end_are_refused(engine: Asker) -> None:
    body = {"return_logprob": True, "logprob_start_len": len(PROMPT) + 1}
    words = await engine.refused(400, "/generate", input_ids=PROMPT, **body)
    assert "logprob_start_len" in words
