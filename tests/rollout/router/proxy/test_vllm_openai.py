"""vLLM's OpenAI routes over sockets: a request goes on where its engine died, with exact tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from engines.fake import faults
from tests.rollout.router.served_vllm import PROMPT, Served, events_of, served
from tests.support.vllm_stub.forms import ids_of, logprob_of, text_of
from tests.support.waits import until

pytestmark = pytest.mark.timeout(60)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BEGUN = ids_of("<user>hi</><assistant>")
NUM, DIES_AFTER = 20, 9
USAGE = {"include_usage": True}


def completion(**more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": NUM,
        "logprobs": 0,
        "return_token_ids": True,
        **more,
    }


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, "max_tokens": NUM, "logprobs": True, **more}


def generated(prompt: Sequence[int], num: int) -> list[int]:
    """What a fake engine generates."""
    return [(sum(prompt) + 7 * place) % 1000 for place in range(num)]


async def lost_one(whole: Served, path: str, body: dict[str, Any], **headers: str) -> bytes:
    """The reply of a request whose engine dies after nine tokens, while weights 4 are published."""
    first = whole.engines[0]
    first.faults.strike("generate", faults.hang(tokens=DIES_AFTER))

    def hangs() -> bool:
        return DIES_AFTER in [len(one.output_ids) for one in first.in_flight.values()]

    for _ in range(2):
        asked = asyncio.create_task(whole.post(body, path, **headers))
        await until(lambda asked=asked: asked.done() or hangs())
        if hangs():
            await whole.host.set_gate("open", weight_version=4)
            first.die("killed")
        status, _, content = await asked
        assert status == 200, content
        if first.is_dead:
            return bytes(content)
    raise AssertionError("no request was on the engine that dies")


def kept_of(metadata: Any) -> int:
    """How many tokens of the old weights are in the reply, whose spans must be right."""
    assert metadata["num_failovers"] == 1
    old, new = metadata["weight_versions"]
    kept: int = old["end"]
    assert 0 < kept < NUM
    assert old == {"version": "3", "start": 0, "end": kept}
    assert new == {"version": "4", "start": kept, "end": NUM}
    return kept


async def aborted_by_a_pause(whole: Served, path: str, body: dict[str, Any]) -> bytes:
    """The reply of a request that a pause aborts after some tokens, before weights 4."""
    (engine,) = whole.engines
    asked = asyncio.create_task(whole.post(body, path))
    await until(lambda: [one for one in engine.in_flight.values() if one.output_ids])
    await whole.host.set_gate("holding", reason="a push")
    await engine.answer("/pause", {"mode": "abort"})  # type: ignore[attr-defined]
    await engine.answer("/resume", {})  # type: ignore[attr-defined]
    await whole.host.set_gate("open", weight_version=4)
    status, _, content = await asked
    assert status == 200, content
    return bytes(content)


def check_ids(ids: list[int], prompt: Sequence[int], kept: int) -> None:
    """The first engine's tokens, and the second's for the prompt with them."""
    assert ids[:kept] == generated(prompt, kept)
    assert ids[kept:] == generated([*prompt, *ids[:kept]], NUM - kept)


def check_completion(choice: Any, metadata: Any) -> None:
    kept, ids = kept_of(metadata), choice["token_ids"]
    check_ids(ids, PROMPT, kept)
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["text"] == text_of(ids)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [logprob_of(one) for one in ids]
    assert logprobs["tokens"] == [text_of([one]) for one in ids]
    assert [len(one) for one in logprobs["top_logprobs"]] == [1] * NUM
    assert logprobs["text_offset"] == [len(text_of(ids[:place])) for place in range(NUM)]
    assert choice["finish_reason"] == "length"


async def test_a_completion_goes_on_with_its_tokens() -> None:
    async with served("vllm", "vllm", token_failover="on") as whole:
        reply = json.loads(await lost_one(whole, COMPLETIONS, completion()))
        (choice,) = reply["choices"]
        check_completion(choice, reply["metadata"])
        assert reply["usage"].items() >= counts(len(PROMPT)).items()


async def test_a_streamed_completion_goes_on_with_its_tokens() -> None:
    async with served("vllm", "vllm", token_failover="on") as whole:
        body = completion(stream=True, stream_options=USAGE)
        content = await lost_one(whole, COMPLETIONS, body)
        *events, usage = events_of(content)
        assert content.endswith(b"data: [DONE]\n\n")
        assert usage["usage"].items() >= counts(len(PROMPT)).items()
        assert {event["id"] for event in events} == {events[0]["id"]}
        check_completion(joined(events), events[-1]["metadata"])


@pytest.mark.parametrize("has_ids", [False, True])
async def test_a_chat_goes_on_with_its_tokens(has_ids: bool) -> None:
    async with served("vllm", "vllm", token_failover="on") as whole:
        reply = json.loads(await lost_one(whole, CHAT, chat(return_token_ids=has_ids)))
        (choice,) = reply["choices"]
        check_chat(choice, choice["message"]["content"], reply["metadata"], has_ids=has_ids)
        assert choice["message"]["role"] == "assistant"
        assert reply.get("prompt_token_ids") == (list(BEGUN) if has_ids else None)
        assert reply["usage"].items() >= counts(len(BEGUN)).items()


@pytest.mark.parametrize("has_ids", [False, True])
async def test_a_streamed_chat_goes_on_with_its_tokens(has_ids: bool) -> None:
    async with served("vllm", "vllm", token_failover="on") as whole:
        body = chat(stream=True, stream_options=USAGE, return_token_ids=has_ids)
        content = await lost_one(whole, CHAT, body)
        *events, usage = events_of(content)
        assert content.endswith(b"data: [DONE]\n\n")
        assert usage["usage"].items() >= counts(len(BEGUN)).items()
        assert [event.get("prompt_token_ids") for event in events] == [
            list(BEGUN) if has_ids else None,
            *[None] * (len(events) - 1),
        ]
        roles = [event["choices"][0]["delta"].get("role") for event in events]
        assert roles == ["assistant", *[None] * (len(events) - 1)]
        choice = joined(events)
        check_chat(choice, choice["text"], events[-1]["metadata"], has_ids=has_ids)


def check_chat(choice: Any, text: str, metadata: Any, *, has_ids: bool) -> None:
    kept, ids = kept_of(metadata), list(ids_of(text))
    check_ids(ids, BEGUN, kept)
    assert choice.get("token_ids") == (ids if has_ids else None)
    entries = choice["logprobs"]["content"]
    assert [one["token"] for one in entries] == [text_of([one]) for one in ids]
    assert [one["logprob"] for one in entries] == [logprob_of(one) for one in ids]
    assert choice["finish_reason"] == "length"


async def test_a_pause_aborts_no_completion_of_a_client() -> None:
    async with served("vllm", token_s=0.02, token_failover="on") as whole:
        reply = json.loads(await aborted_by_a_pause(whole, COMPLETIONS, completion()))
        check_completion(reply["choices"][0], reply["metadata"])


async def test_without_failover_a_client_sees_the_abort_of_a_pause() -> None:
    async with served("vllm", token_s=0.02, token_failover="asked") as whole:
        reply = json.loads(await aborted_by_a_pause(whole, COMPLETIONS, completion()))
        assert reply["choices"][0]["finish_reason"] == "abort"


async def test_a_pause_aborts_no_streamed_chat_of_a_client() -> None:
    async with served("vllm", token_s=0.02, token_failover="on") as whole:
        body = chat(stream=True, return_token_ids=True)
        events = events_of(await aborted_by_a_pause(whole, CHAT, body))
        choice = joined(events)
        check_chat(choice, choice["text"], events[-1]["metadata"], has_ids=True)


def counts(num_prompt: int) -> dict[str, int]:
    total = num_prompt + NUM
    return {"prompt_tokens": num_prompt, "completion_tokens": NUM, "total_tokens": total}


def joined(events: list[Any]) -> dict[str, Any]:
    """The choice that the events of a stream make, with its text under ``text``."""
    whole: dict[str, Any] = {"text": "", "logprobs": {}}
    for event in events:
        (choice,) = event["choices"]
        assert "finish_reason" not in whole
        whole["text"] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"].setdefault(name, []).extend(values)
        if choice.get("token_ids"):
            whole.setdefault("token_ids", []).extend(choice["token_ids"])
        if choice.get("prompt_token_ids"):
            assert "prompt_token_ids" not in whole
            whole["prompt_token_ids"] = choice["prompt_token_ids"]
        if choice["finish_reason"]:
            whole["finish_reason"] = choice["finish_reason"]
    return whole
