"""What is cached of a prompt is found by no other load of an adapter, however many there were."""

from __future__ import annotations

import pytest
import torch
from engines.embedded.generation.generation import Generation
from engines.embedded.generation.pages import PAGE_SIZE, Pages
from engines.embedded.generation.sampling_params import Params
from engines.embedded.generation.scheduler import Scheduler
from engines.embedded.weights.lora_adapters import Adapter, Adapters

pytestmark = pytest.mark.embedded
NUM_LOADS = 5000
PROMPT = list(range(PAGE_SIZE + 1))


def generate(scheduler: Scheduler, adapter: Adapter | None, ids: list[int], num_prompt: int) -> int:
    """Compute all of ``ids``, the first ones as a prompt; how many were found in the cache."""
    generation = Generation("r", ids[:num_prompt], Params(), adapter=adapter)
    scheduler.add(generation)
    for token in [*ids[num_prompt:], 0]:
        (part,) = scheduler.next_step()
        scheduler.advance(part)
        part.sequence.ids.append(token)
    scheduler.remove("r")
    return generation.cached_tokens


def one_request(num_pages: int) -> Scheduler:
    return Scheduler(Pages(num_pages), max_requests=1, max_tokens=2048)


def loaded(adapters: Adapters, name: str) -> Adapter:
    halves = {"0.lora_A.weight": torch.zeros(1, 2), "0.lora_B.weight": torch.zeros(2, 1)}
    return adapters.load(name, {"r": 1, "lora_alpha": 1}, halves.items())


def test_no_two_loads_share_a_page_nor_one_with_the_base() -> None:
    adapters = Adapters(torch.nn.Sequential(torch.nn.Linear(2, 2)), is_enabled=True, max_rank=1)
    scheduler = one_request(2 * NUM_LOADS + 8)  # no page is given up
    of_all: list[Adapter | None] = [None, loaded(adapters, "living")]
    for load in range(NUM_LOADS):
        of_all.append(loaded(adapters, f"v{load}"))
        if load:
            adapters.unload(f"v{load - 1}")
    for expected in (0, PAGE_SIZE):  # then each finds its own
        found = [generate(scheduler, adapter, PROMPT, len(PROMPT)) for adapter in of_all]
        assert found == [expected] * len(of_all)


@pytest.mark.parametrize("num_prompt", [1, 3, PAGE_SIZE, PAGE_SIZE + 3])
@pytest.mark.parametrize("salt", [None, 1, 1 << 66])
def test_the_next_turn_finds_the_tokens_that_were_generated(
    num_prompt: int, salt: int | None
) -> None:
    adapter = None if salt is None else Adapter("a", salt, {}, {})
    scheduler, ids = one_request(16), [*PROMPT, *PROMPT]
    assert generate(scheduler, adapter, ids, num_prompt) == 0
    assert generate(scheduler, adapter, ids, len(ids)) == 2 * PAGE_SIZE
