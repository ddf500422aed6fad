"""Turns of a session that want weight versions, or a kind of log-probs."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.rollout.agents.conftest import USER, Agent, MakeAgentOf
from tests.support.chat_models import write_chat_model

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
EXACT = "x-weight-version"


@pytest.fixture
def make_agent(make_agent_of: MakeAgentOf, tmp_path: Path) -> Any:
    return partial(make_agent_of, write_chat_model(tmp_path / "model"), lambda prompt: "answer")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("in_body", [False, True])
async def test_a_turn_keeps_its_contract(make_agent: Any, in_body: bool, stream: bool) -> None:
    agent: Agent = await make_agent()

    def wish(version: int) -> dict[str, Any]:
        if in_body:
            return {"extra_body": {"weight_version": version}, "stream": stream}
        return {"extra_headers": {EXACT: str(version)}, "stream": stream}

    with pytest.raises(openai.ConflictError) as caught:
        await agent.ask([USER], **wish(6))
    assert isinstance(caught.value.body, dict)
    assert (caught.value.body["type"], caught.value.body["weight_version"]) == ("weight_version", 7)
    answer = await agent.ask([USER], **wish(7))
    if stream:
        assert [part async for part in answer]
    (turn,) = await agent.turns()
    assert {span["version"] for span in turn["weight_versions"]} == {"7"}
    assert "weight_version" not in agent.bench.engines[0].seen[-1].json
    assert not agent.bench.engines[0].seen[-1].header(EXACT)


async def test_a_turn_waits_for_the_push(make_agent: Any) -> None:
    agent: Agent = await make_agent()
    headers = {"x-min-weight-version": "8"}
    pending = asyncio.ensure_future(agent.ask([USER], extra_headers=headers))
    await agent.bench.wait_until_held(1)
    await agent.bench.host.set_gate("open", weight_version=8)
    with pytest.raises(openai.ConflictError):  # the scripted engine is still at 7
        await pending
    assert not await agent.turns()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"extra_headers": {EXACT: "x"}}, "weight_version is 'x'"),
        ({"extra_body": {"weight_version": "7"}}, "weight_version is '7'"),
        (
            {"extra_headers": {EXACT: "6"}, "extra_body": {"weight_version": 7}},
            "weight_version is 6 in the header x-weight-version and 7 in the body",
        ),
        ({"extra_headers": {"x-logprob-kind": "raw"}}, "logprob_kind is raw, and"),
    ],
)
async def test_what_is_no_contract_or_cannot_be_kept_is_a_400(
    make_agent: Any, options: dict[str, Any], words: str
) -> None:
    agent: Agent = await make_agent()
    with pytest.raises(openai.BadRequestError, match=words):
        await agent.ask([USER], **options)
    assert not agent.bench.engines[0].seen


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_passes_the_trace_of_its_client_on(make_agent: Any, stream: bool) -> None:
    agent: Agent = await make_agent()
    trace = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "vendor=a",
    }
    for headers in (trace, {}):
        answer = await agent.ask([USER], extra_headers=headers, stream=stream)
        if stream:
            assert [part async for part in answer]
    first, second = [seen for seen in agent.bench.engines[0].seen if seen.target == "/generate"]
    for name, value in trace.items():
        assert first.header(name) == [value]
        assert second.header(name) == []
