"""The experts of a mixture: those that a forward pass of transformers chooses for the same ids."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.embedded import reference
from tests.engines.embedded.engine_client import PROMPT, Asker, Server, connected, sampling
from tests.support.event_lines import async_lines_of

pytestmark = pytest.mark.embedded
LONG = list(range(60))  # over several pages of the cache


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout.testing.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "moe", "qwen3_moe", num_layers=3)


@pytest.fixture(scope="module")
def server(mixture: Path) -> Iterator[Server]:
    server = Server(mixture)
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


@pytest.fixture
async def asker(server: Server) -> AsyncIterator[Asker]:
    async with connected(server) as asker:
        yield asker


def experts_of(reply: dict[str, Any], prompt: list[int]) -> list[Any]:
    import numpy as np

    data = base64.b64decode(reply["meta_info"]["routed_experts"])
    num = len(prompt) + len(reply["output_ids"]) - 1
    rows: list[Any] = np.frombuffer(data, np.int32).reshape(num, 3, 2).tolist()
    return rows


def expected(path: Path, ids: list[int]) -> list[Any]:
    _, chosen = reference.routing(reference.model(path), ids)
    rows: list[Any] = chosen.transpose(0, 1).tolist()
    return rows


async def test_each_token_has_the_experts_of_a_forward_pass(asker: Asker, mixture: Path) -> None:
    prompts = [PROMPT, LONG, [7, 8, 9] * 1000]  # the last one is split over steps
    # The second time the prompts are in the cache, and others run beside them.
    for _ in range(2):
        replies = await asyncio.gather(
            *(asker.generate(one, temperature=0, return_routed_experts=True) for one in prompts),
            asker.generate(LONG, temperature=0),
        )
        assert "routed_experts" not in replies[-1]["meta_info"]
        for prompt, reply in zip(prompts, replies, strict=False):
            ids = [*prompt, *reply["output_ids"][:-1]]
            assert experts_of(reply, prompt) == expected(mixture, ids)


async def events(asker: Asker, prompt: list[int], **options: Any) -> AsyncIterator[dict[str, Any]]:
    body = {
        "input_ids": prompt,
        "sampling_params": sampling(temperature=0, **options),
        "return_routed_experts": True,
        "stream": True,
    }
    async with asker.http.stream("POST", "/generate", json=body) as response:
        async for line in async_lines_of(response):
            if line.startswith("data: {"):
                yield json.loads(line[6:])


async def test_every_event_of_a_stream_has_the_rows_of_its_tokens(asker: Asker) -> None:
    whole = await asker.generate(temperature=0, return_routed_experts=True)
    rows = experts_of(whole, PROMPT)
    seen: list[Any] = []
    async for event in events(asker, PROMPT):
        seen = experts_of(event, PROMPT)
        assert seen == rows[: len(seen)]
    assert seen == rows


async def test_a_request_that_lost_its_cache_keeps_one_row_for_each_token(
    asker: Asker, mixture: Path
) -> None:
    seen: list[dict[str, Any]] = []
    async for event in events(asker, LONG, max_new_tokens=200, ignore_eos=True):
        seen.append(event)
        if len(seen) == 1:
            await asker.post("/pause_generation", mode="retract")
            await asker.post("/continue_generation")
    last = seen[-1]
    assert len(last["output_ids"]) == 200
    ids = [*LONG, *last["output_ids"][:-1]]
    assert experts_of(last, LONG) == expected(mixture, ids)
