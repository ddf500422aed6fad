"""Values that end SGLang's scheduler, in front of real engines: none is lost, and each is named.

Beside each of them are requests with a least length and penalties, which share its batch.  So it is
with 200 other odd values, each of which the engine takes or refuses, and outlives.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.odd_values import FATAL, FATAL_PROMPTS, ODD
from tests.support.real_policy import RealPolicy, one_engine, real_policy

pytestmark = pytest.mark.timeout(900)
PLAIN: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0}
BESIDE = {"min_new_tokens": 25, "max_new_tokens": 30, "frequency_penalty": 0.5}


@pytest.fixture(scope="module")
def only(
    kind: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealPolicy]:
    folder = tmp_path_factory.mktemp(f"fatal-{kind}")
    with real_policy(models[:1], folder, {"main": one_engine(kind)}) as policy:
        yield policy


async def replies_to(policy: RealPolicy, fields: dict[str, Any]) -> tuple[int, str]:
    """Status and content of the reply; the requests beside it have to succeed."""
    sampling = fields.get("sampling_params", {})
    body = {"input_ids": [60, 61, 62], **fields}
    if isinstance(sampling, dict):
        body["sampling_params"] = {**PLAIN, **sampling}
    if "text" in fields:
        del body["input_ids"]
    assert policy.handle.url is not None
    async with httpx.AsyncClient(base_url=policy.handle.url, timeout=60) as client:
        plain = {"input_ids": [70, 71, 72], "sampling_params": BESIDE, "return_logprob": True}
        beside = [asyncio.create_task(client.post("/generate", json=plain)) for _ in range(2)]
        reply = await client.post(
            "/generate",
            content=json.dumps(body),
            headers={"content-type": "application/json"},
        )
        for other in await asyncio.gather(*beside):
            assert other.status_code == 200, (fields, other.text)
            assert len(other.json()["output_ids"]) >= BESIDE["min_new_tokens"]
    return reply.status_code, reply.text


async def test_what_ends_a_scheduler_reaches_no_engine(only: RealPolicy) -> None:
    engines = only.identities()
    for fields in FATAL:
        status, text = await replies_to(only, fields)
        assert status == 400, (fields, text)
        assert " has " in text, (fields, text)
    assert only.identities() == engines


async def test_engines_outlive_other_odd_values(only: RealPolicy) -> None:
    engines = only.identities()
    for fields in ODD:
        await replies_to(only, fields)
        assert only.identities() == engines, fields


async def test_a_prompt_that_ends_a_scheduler_ends_one_and_is_named(
    kind: str, only: RealPolicy
) -> None:
    assert only.handle.url is not None
    async with httpx.AsyncClient(base_url=only.handle.url, timeout=120) as client:
        # An engine takes a while to come back.
        for fields in FATAL_PROMPTS[: 1 if kind == "sglang" else None]:
            reply = await client.post("/generate", json={**fields, "sampling_params": PLAIN})
            assert reply.status_code == 400, (fields, reply.text)
            if kind == "sglang":
                assert "was lost with this request: input_ids has the id 1048576" in reply.text
