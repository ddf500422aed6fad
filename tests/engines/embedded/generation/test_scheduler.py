"""What a step computes, over random requests and a small cache."""

from __future__ import annotations

import random

import pytest
from engines.embedded.generation.generation import Generation
from engines.embedded.generation.pages import PAGE_SIZE, Pages
from engines.embedded.generation.sampling_params import Params
from engines.embedded.generation.scheduler import Part, Scheduler
from hypothesis import given, settings
from hypothesis import strategies as some

MOST_TOKENS = 40


def scheduler(num_pages: int = 16, max_requests: int = 4) -> Scheduler:
    return Scheduler(Pages(num_pages), max_requests=max_requests, max_tokens=MOST_TOKENS)


def generation(rid: str, prompt: list[int], max_new_tokens: int = 4) -> Generation:
    return Generation(rid, prompt, Params(max_new_tokens=max_new_tokens))


def finish(batch: Scheduler, parts: list[Part]) -> None:
    """As the generation thread does, with a next token that follows from those before it."""
    for part in parts:
        batch.advance(part)
    for part in parts:
        if part.is_last:
            token = sum(part.sequence.ids) % 97
            part.sequence.ids.append(token)
            if part.sequence.generation.add(token, 0.0, "0"):
                batch.remove(part.sequence.generation.rid)


class Cache:
    """What each place of the cache holds: the ids up to there, as keys and values do."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, parts: list[Part]) -> None:
        for part in parts:
            sequence = part.sequence
            for index in range(sequence.num_cached, sequence.num_cached + part.num_tokens):
                page = sequence.pages[index // PAGE_SIZE]
                self.places[page, index % PAGE_SIZE] = tuple(sequence.ids[: index + 1])
        for part in parts:  # only now: each sees what all have written
            sequence = part.sequence
            for index in range(sequence.num_cached + part.num_tokens):
                page = sequence.pages[index // PAGE_SIZE]
                assert self.places[page, index % PAGE_SIZE] == tuple(sequence.ids[: index + 1])


@settings(max_examples=60, deadline=None)
@given(
    num_pages=some.integers(8, 24),
    max_requests=some.integers(1, 5),
    seed=some.integers(0, 10_000),
    retract_at=some.integers(0, 30),
)
def test_each_token_sees_its_own_past_whatever_shares_and_takes_pages(
    num_pages: int, max_requests: int, seed: int, retract_at: int
) -> None:
    draw = random.Random(seed)
    batch, cache = scheduler(num_pages, max_requests), Cache()
    longest = num_pages * PAGE_SIZE
    shared = [draw.randrange(5) for _ in range(longest)]
    all_of_them = []
    for number in range(8):
        num_prompt = draw.randrange(1, min(100, longest - 12))
        prompt = shared[: draw.randrange(num_prompt + 1)]
        prompt += [draw.randrange(5) for _ in range(num_prompt - len(prompt))]
        all_of_them.append(generation(f"r{number}", prompt, draw.randrange(1, 12)))
    waiting = list(all_of_them)
    num_steps = 0
    while waiting or batch.num_in_flight:
        if waiting and draw.random() < 0.4:
            batch.add(waiting.pop())
            continue
        parts = batch.next_step()
        assert bool(parts) == bool(batch.num_in_flight)
        assert sum(part.num_tokens for part in parts) <= MOST_TOKENS
        assert len(batch.running) <= max_requests
        cache.run(parts)
        finish(batch, parts)
        num_steps += 1
        assert num_steps < 2000
        if num_steps == retract_at:
            batch.retract()
            assert not batch.running
            assert not batch.pages.num_used
        if draw.random() < 0.02:
            batch.retract()
            batch.pages.forget()
            cache.places.clear()
    assert not batch.pages.num_used
    for one in all_of_them:
        ids = list(one.prompt_ids)
        for token in one.output_ids:
            assert token == sum(ids) % 97
            ids.append(token)
        assert len(one.output_ids) == one.params.max_new_tokens


def test_next_tokens_go_before_the_rest_of_prompts() -> None:
    batch = scheduler()
    batch.add(generation("short", [1] * 5))
    batch.add(generation("long", [2] * 90))
    sizes = []
    for _ in range(3):
        parts = batch.next_step()
        sizes.append({part.sequence.generation.rid: part.num_tokens for part in parts})
        finish(batch, parts)
    assert sizes == [
        {"short": 5, "long": 35},
        {"short": 1, "long": 39},
        {"short": 1, "long": 16},
    ]


def test_where_the_cache_is_full_the_latest_begins_again_and_none_is_lost() -> None:
    batch = scheduler(num_pages=6)
    first, second = (generation(name, [number] * 16, 40) for number, name in enumerate("ab"))
    batch.add(first)
    batch.add(second)
    put_back = 0
    while batch.num_in_flight:
        finish(batch, batch.next_step())
        put_back += bool(batch.waiting)
        if batch.waiting:
            assert list(batch.waiting) == ["b"]
    assert put_back
    assert [len(one.output_ids) for one in (first, second)] == [40, 40]


@pytest.mark.parametrize("num_shared", [0, 15, 16, 40, 48])
def test_whole_pages_of_a_known_prefix_are_not_computed_again(num_shared: int) -> None:
    batch = scheduler()
    prompt = list(range(48))
    batch.add(generation("first", prompt, 1))
    while batch.num_in_flight:
        finish(batch, batch.next_step())
    second = generation("second", prompt[:num_shared] + [99] * (48 - num_shared), 1)
    batch.add(second)
    (part,) = batch.next_step()
    expected = min(num_shared, 47) // PAGE_SIZE * PAGE_SIZE
    assert second.cached_tokens == expected
    assert part.num_tokens == min(48 - expected, MOST_TOKENS)
    batch.remove("second")
    batch.pages.forget()
    batch.add(generation("third", prompt, 1))
    (part,) = batch.next_step()
    assert part.sequence.num_cached == 0
