"""An agent's session and a chat with ids over real vLLM: the ids are those that it sampled."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

import rollout
from rollout.core.types import EngineStatus
from rollout.router.continuation.reply import Reply
from tests.rollout.router.continuation.replies import CHAT, read
from tests.support.chat_models import THINKS_FIRST, TOOLS
from tests.support.engine_keys import Keys
from tests.support.real_policy import RealPolicy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
NUM = 16


def replayed(policy: RealPolicy, prompt: list[int], num: int) -> Any:
    greedy = rollout.SamplingParams(max_new_tokens=num, temperature=0.0)
    return policy.handle.generate(prompt, greedy).result(60)


def test_a_session_has_the_ids_that_vllm_sampled(policy: RealPolicy) -> None:
    """The engines name the folder, where the router finds the template."""
    (policy.models[0] / "chat_template.jinja").write_text(THINKS_FIRST)
    with policy.handle.session() as session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        ask: Any = client.chat.completions.create
        options = {"model": "policy", "tools": TOOLS, "temperature": 0, "max_tokens": NUM}
        history = [{"role": "user", "content": "one"}]
        whole = ask(messages=history, **options)
        history += [whole.choices[0].message, {"role": "user", "content": "two"}]
        *_, last = ask(messages=history, stream=True, **options)
        assert last.session["parent"] == 0
        first, second = session.turns().result(60)
        (sample,) = session.samples().result(60)
    prompt = first["prompt_ids"] + first["output_ids"] + second["prompt_ids"]
    again = replayed(policy, prompt, NUM)
    assert list(again.output_ids) == second["output_ids"]
    assert second["output_logprobs"] == pytest.approx(again.output_logprobs, abs=1e-4)
    assert sample.prompt_ids + sample.output_ids == prompt + second["output_ids"]
    assert sample.versions == [policy.handle.weight_version] * 2


def test_a_chat_with_ids_continues_on_another_engine(policy: RealPolicy) -> None:
    """The second engine's prompt has the ids of the first one's prompt and answer."""
    one, other = policy.engines()
    whole, lost = chat(policy), chat(policy)
    events = ask(one, whole)
    lost.body(0, "vllm")
    for event in events[: len(events) // 2]:
        lost.absorb(event)
    lost.lose_engine()
    assert 0 < lost.num_kept < NUM
    ask(other, lost)
    (expected,), (choice,) = whole.payload()["choices"], lost.payload()["choices"]
    assert choice["token_ids"] == expected["token_ids"]
    assert choice["message"] == expected["message"]
    assert choice["finish_reason"] == "length"
    logprobs, others = [
        [entry["logprob"] for entry in one["logprobs"]["content"]] for one in (expected, choice)
    ]
    assert others == pytest.approx(logprobs, abs=1e-4)


def chat(policy: RealPolicy) -> Reply:
    raw = {
        "model": str(policy.models[0]),
        "messages": [{"role": "user", "content": "one"}],
        "temperature": 0,
        "max_tokens": NUM,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    reply = read(CHAT, json.dumps(raw).encode(), dialects="vllm")
    assert reply is not None
    return reply


def ask(engine: EngineStatus, reply: Reply) -> list[Any]:
    """Absorb the events of this chat, and return them."""
    answer = httpx.post(
        f"{engine.endpoint.url}/v1/chat/completions",
        content=reply.body(0, "vllm"),
        headers={"content-type": "application/json"},
        auth=Keys(engine),
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.content.split(b"\n") if line.startswith(b"data: {")]
    events = [json.loads(line[6:]) for line in lines]
    for event in events:
        reply.absorb(event)
    return events
