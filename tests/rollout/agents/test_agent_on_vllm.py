"""The openai package, unchanged, in a session, over vLLM engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from engines.fake import faults
from rollout.driver.client.branch_samples import branch_samples
from tests.rollout.router.served_vllm import Served, served
from tests.support.agent_workers import worker_of_router
from tests.support.chat_models import write_chat_model
from tests.support.waits import until

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytestmark = pytest.mark.timeout(60)

USER = {"role": "user", "content": "2+2?"}
NUM = 20


@asynccontextmanager
async def client_of(whole: Served, folder: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of session ``s`` of a worker in front of the router."""
    async with (
        worker_of_router(whole.url, folder) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/sessions/s/v1", api_key="none", max_retries=0
        ) as client,
    ):
        yield client


async def turns_of(client: openai.AsyncOpenAI) -> list[dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as http,
        http.get(str(client.base_url).removesuffix("/v1/")) as reply,
    ):
        turns: list[dict[str, Any]] = (await reply.json())["turns"]
        return turns


def generated(prompt: list[int], num: int) -> list[int]:
    """What a fake engine generates."""
    return [(sum(prompt) + 7 * place) % 1000 for place in range(num)]


def answer_of(reply: Any) -> dict[str, Any]:
    message: dict[str, Any] = reply.choices[0].message.model_dump()
    return message


@pytest.mark.parametrize("kinds", [("vllm",), ("vllm", "sglang")], ids="-".join)
async def test_a_session_has_the_exact_ids(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """The engines name the folder of the tokenizer."""
    model = write_chat_model(tmp_path / "model")
    async with (
        served(*kinds, model_path=str(model)) as whole,
        client_of(whole, tmp_path / "agents") as client,
    ):
        ask: Any = client.chat.completions.create
        first = await ask(model="m", messages=[USER], max_tokens=4)
        history = [USER, answer_of(first), USER]
        stream = await ask(model="m", messages=history, max_tokens=NUM, stream=True)
        *_, last = [part async for part in stream]
        assert last.session["parent"] == 0
        one, two = await turns_of(client)
    assert one["output_ids"] == generated(one["prompt_ids"], 4)
    prompt = one["prompt_ids"] + one["output_ids"] + two["prompt_ids"]
    assert two["output_ids"] == generated(prompt, NUM)
    assert two["output_logprobs"] == [-1.0] * NUM
    (sample,) = branch_samples("s", [one, two])
    assert sample.prompt_ids + sample.output_ids == prompt + two["output_ids"]
    assert sample.versions == [3, 3]
    assert sample.logprob_kind == "full"


async def test_a_turn_with_a_cut_marks_its_sample(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model")
    async with (
        served("vllm", model_path=str(model)) as whole,
        client_of(whole, tmp_path / "agents") as client,
    ):
        ask: Any = client.chat.completions.create
        first = await ask(model="m", messages=[USER], max_tokens=4, top_p=0.5)
        await ask(model="m", messages=[USER, answer_of(first), USER], max_tokens=4)
        turns = await turns_of(client)
    assert [turn["logprob_kind"] for turn in turns] == ["cut", "full"]
    (sample,) = branch_samples("s", turns)
    assert sample.logprob_kind == "cut"


async def test_a_turn_goes_on_with_its_tokens_when_its_engine_dies(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model")
    async with (
        served("vllm", "vllm", model_path=str(model)) as whole,
        client_of(whole, tmp_path / "agents") as client,
    ):
        ask: Any = client.chat.completions.create
        first = await ask(model="m", messages=[USER], max_tokens=4)
        history = [USER, answer_of(first), USER]
        # The next turn is on the engine that has the prefix of the first one.
        other, dying = sorted(whole.engines, key=lambda one: "generate" in one.operations())
        await other.answer("/update_weight_version", {"new_version": "4"})  # type: ignore[attr-defined]
        dying.faults.strike("generate", faults.hang(tokens=9))
        asked = asyncio.create_task(ask(model="m", messages=history, max_tokens=NUM))
        await until(lambda: 9 in [len(one.output_ids) for one in dying.in_flight.values()])
        dying.die("killed")
        await asked
        assert dying.is_dead
        one, two = await turns_of(client)
    prompt, ids = one["prompt_ids"] + one["output_ids"] + two["prompt_ids"], two["output_ids"]
    old, new = two["weight_versions"]
    kept = old["end"]
    assert 0 < kept <= 9
    assert ids == generated(prompt, kept) + generated(prompt + ids[:kept], NUM - kept)
    assert (old["version"], new["version"], new["end"]) == ("3", "4", NUM)
    assert two["output_logprobs"] == [-1.0] * NUM


async def test_routed_experts_of_a_session_are_refused_in_words(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model")
    async with (
        served("vllm", model_path=str(model)) as whole,
        client_of(whole, tmp_path / "agents") as client,
    ):
        with pytest.raises(openai.BadRequestError, match="do not take return_routed_experts"):
            await client.chat.completions.create(
                model="m",
                messages=[USER],  # type: ignore[list-item]
                extra_body={"return_routed_experts": True},
            )
