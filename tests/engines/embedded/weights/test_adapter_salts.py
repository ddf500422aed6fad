"""What is cached of a prompt is found by no other load of an adapter, however many there were."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.embedded.generation.batcher import PAGE_SIZE
from engines.embedded.generation.kv_cache import RegionCache
from engines.embedded.weights.lora_adapters import Adapter, Adapters
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    compute_block_hash,
)

pytestmark = pytest.mark.embedded
NUM_LOADS = 5000
PROMPT = [(1 << 20) - 1, *range(PAGE_SIZE)]  # the largest id, which has no free bit below 20


class _Keys:
    """An allocator that keeps only the keys of what it is given and is searched for."""

    tokens_per_page = PAGE_SIZE

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.searched: list[list[int]] = []

    def mark_complete_blocks(self, _: str, ids: list[int], __: int) -> None:
        self.written.append(_keys_of(ids))

    def match_prefix_blocks(self, ids: list[int]) -> list[int]:
        self.searched.append(_keys_of(ids))
        return []


def _keys_of(ids: Sequence[int]) -> list[int]:
    keys: list[int] = []
    for begin in range(0, len(ids) - PAGE_SIZE + 1, PAGE_SIZE):
        parent = keys[-1] if keys else None
        keys.append(compute_block_hash(parent, list(ids[begin : begin + PAGE_SIZE])))
    return keys


def _cache(keys: _Keys, adapter: Adapter | None) -> Any:
    cache: Any = object.__new__(RegionCache)
    cache.cache_allocators = {"only": keys}
    cache.allow_block_sharing = cache.use_prefix_sharing = True
    cache.generation_of = lambda _: SimpleNamespace(adapter=adapter, wants_experts=False)
    return cache


def _generate(keys: _Keys, adapter: Adapter | None, prompt: list[int], more: list[int]) -> None:
    """What a generation does with the keys: search for the prompt, write prompt and tokens."""
    cache = _cache(keys, adapter)
    cache.search_prefix_match("a", prompt)
    state = SimpleNamespace(
        request_id="a",
        status=None,
        initial_tokens=prompt,
        generated_tokens=more,
        generation=SimpleNamespace(adapter=adapter),
    )
    cache.mark_complete_blocks(state, {"only": 1})


def _loaded(adapters: Adapters, name: str) -> Adapter:
    halves = {"0.lora_A.weight": torch.zeros(1, 2), "0.lora_B.weight": torch.zeros(2, 1)}
    return adapters.load(name, {"r": 1, "lora_alpha": 1}, halves.items())


def test_no_two_loads_share_a_key_nor_one_with_the_base() -> None:
    adapters = Adapters(torch.nn.Sequential(torch.nn.Linear(2, 2)), is_enabled=True, max_rank=1)
    keys = _Keys()
    _generate(keys, None, PROMPT, [])
    of_first = _loaded(adapters, "living")
    _generate(keys, of_first, PROMPT, [])
    for load in range(NUM_LOADS):
        _generate(keys, _loaded(adapters, f"v{load}"), PROMPT, [])
        if load:
            adapters.unload(f"v{load - 1}")
    firsts = [written[0] for written in keys.written]
    assert len(set(firsts)) == len(firsts) == NUM_LOADS + 2
    assert keys.searched == keys.written  # each finds its own


@pytest.mark.parametrize("num_prompt", [1, 3, PAGE_SIZE, PAGE_SIZE + 3])
@pytest.mark.parametrize("salt", [1, 2047, 2048, 1 << 40, (1 << 66) - 1])
def test_the_next_turn_finds_the_tokens_that_were_generated(num_prompt: int, salt: int) -> None:
    adapter, keys = Adapter("a", salt, {}, {}), _Keys()
    ids = [*PROMPT, *PROMPT]
    _generate(keys, adapter, ids[:num_prompt], ids[num_prompt:])
    _generate(keys, adapter, ids, [])
    assert keys.written[0] == keys.searched[1] != _keys_of(ids)
