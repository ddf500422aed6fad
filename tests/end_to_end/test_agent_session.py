"""An agent over embedded engines, one of which is killed in its second turn: exact samples."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import rollout
from rollout.runtime.handle import ServerHandle
from tests.support.busy_engines import busy_engines
from tests.support.chat_models import THINKS_FIRST, TOOLS
from tests.support.models import make_plain_model

pytest.importorskip("torch")
pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(120)]

NUM_TOKENS = 400


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[ServerHandle]:
    model = make_plain_model(tmp_path / "model", seed=1)
    (model / "chat_template.jinja").write_text(THINKS_FIRST)
    group = {"num_engines": 2, "engine": {"kind": "embedded", "cpus": 0.5}}
    server = {"model_path": str(model), "groups": {"main": group}, "health": {"recover": False}}
    config = {"log_dir": str(tmp_path), "servers": {"policy": server}}
    with rollout.launch(rollout.RolloutConfig.from_dict(config)) as deployment:
        yield deployment["policy"]


def test_a_killed_engine_leaves_the_samples_of_an_agent_exact(policy: ServerHandle) -> None:
    with policy.session() as session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        ask: Any = client.chat.completions.create
        options = {"model": "policy", "tools": TOOLS, "temperature": 0, "max_tokens": NUM_TOKENS}
        history = [{"role": "user", "content": "one"}]
        whole = ask(messages=history, **options)
        history += [whole.choices[0].message, {"role": "user", "content": "two"}]
        stream = iter(ask(messages=history, stream=True, **options))
        assert any(has_text(chunk.choices[0].delta) for chunk in stream)
        (busy,) = busy_engines(policy)
        os.kill(busy.pid, signal.SIGKILL)
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
        ask_raw: Any = client.chat.completions.with_raw_response.create
        raw = ask_raw(messages=history, **options)  # the other engine, without a failure
        again = raw.parse()
        assert again.session["parent"] == last.session["parent"] == 0
        assert raw.headers["x-engine-id"] != busy.engine_id
        check(policy, session.turns().result(60), session.samples().result(60))


def test_the_turns_of_a_session_stay_with_their_cache(policy: ServerHandle) -> None:
    """Beside requests that come and go, each turn finds what the one before it has left."""
    with policy.session() as session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        ask: Any = client.chat.completions.with_raw_response.create
        history: list[Any] = []
        engines, before = set(), 0
        for number in range(6):
            for one in range(number % 2):  # engines that take turns would be others now and then
                policy.generate([one, number], rollout.SamplingParams(max_new_tokens=2)).result(60)
            history.append({"role": "user", "content": f"{number}: " + "and then? " * 10})
            raw = ask(model="policy", messages=history, temperature=0, max_tokens=40)
            reply = raw.parse()
            engines.add(raw.headers["x-engine-id"])
            cached = reply.usage.prompt_tokens_details.cached_tokens
            assert cached >= 0.9 * before
            before = reply.usage.prompt_tokens
            history.append(reply.choices[0].message)
        turns = session.turns().result(60)
    assert {turn["engine_id"] for turn in turns} == engines
    assert len(engines) == 1
    assert turns[-1]["cached_tokens"] == cached


def has_text(delta: Any) -> bool:
    return bool(delta.content or getattr(delta, "reasoning_content", None))


def check(policy: ServerHandle, turns: list[dict[str, Any]], samples: list[rollout.Sample]) -> None:
    """Ids and log-probs are those that an engine gives for the sample's own prompt ids."""
    first, killed, unhurt = turns
    assert [turn["drift"] for turn in turns] == ["clean", "realigned", "realigned"]
    assert killed["prompt_ids"] == unhurt["prompt_ids"]
    assert killed["output_ids"] == unhurt["output_ids"]
    assert killed["output_logprobs"] == pytest.approx(unhurt["output_logprobs"], abs=1e-4)
    greedy = rollout.SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0)
    prompt = first["prompt_ids"] + first["output_ids"] + killed["prompt_ids"]
    replayed = policy.generate(prompt, greedy).result(60)
    assert list(replayed.output_ids) == killed["output_ids"]
    one, other = samples
    assert one.prompt_ids + one.output_ids == prompt + killed["output_ids"]
    assert len(one.output_ids) == len(one.output_logprobs) == len(one.mask)
    assert sum(one.mask) == 2 * NUM_TOKENS
    assert sum(other.mask) == NUM_TOKENS
    assert one.versions == [0, 0]
