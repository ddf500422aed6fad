"""A session that stays with its version has it for all turns, whatever is pushed meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rollout.agents.conftest import USER, Agent, MakeAgentOf, answer_of
from tests.support.chat_models import write_chat_model

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

STAYS = {"lora_path": "policy", "stays_with_version": True}


async def push(agent: Agent, version: int) -> None:
    table = {"policy": f"policy@{version}"}
    await agent.bench.host.set_gate("open", weight_version=version, base_version=1, adapters=table)


@pytest.fixture
async def agent(make_agent_of: MakeAgentOf, tmp_path: Path) -> Agent:
    made = await make_agent_of(write_chat_model(tmp_path / "model"), lambda prompt: "yes")
    await push(made, 3)
    return made


def sent(agent: Agent) -> list[Any]:
    """The adapters that the engine was sent."""
    return [seen.json.get("lora_path") for seen in agent.bench.engines[0].seen]


async def test_all_turns_have_the_version_of_the_first(agent: Agent) -> None:
    messages: list[Any] = []
    for version in (4, 5, 6):
        messages.append(USER)
        messages.append(answer_of(await agent.ask(messages, extra_body=STAYS)))
        await push(agent, version)
    assert sent(agent) == ["policy@3"] * 3
    assert await agent.bench.host.pinned() == {"policy@3": 1}
    # Also a turn that does not say it again.
    await agent.ask([*messages, USER], extra_body={"lora_path": "policy"})
    assert sent(agent)[-1] == "policy@3"
    await agent.send("DELETE")
    assert await agent.bench.host.unpinned("policy@3", 10.0)


async def test_a_session_that_does_not_stay_moves_on(agent: Agent) -> None:
    for version in (4, 5):
        await agent.ask([USER], extra_body={"lora_path": "policy"})
        await push(agent, version)
    assert sent(agent) == ["policy@3", "policy@4"]
    assert await agent.bench.host.pinned() == {}


async def test_a_session_stays_with_the_base(agent: Agent) -> None:
    await agent.ask([USER], extra_body={"lora_path": None, "stays_with_version": True})
    await agent.ask([USER], extra_body={"lora_path": "policy"})
    assert sent(agent) == [None, None]
    assert await agent.bench.host.pinned() == {}


async def test_a_worker_that_stops_pins_nothing(agent: Agent, make_agent_of: MakeAgentOf) -> None:
    await agent.ask([USER], extra_body=STAYS)
    assert await agent.bench.host.pinned() == {"policy@3": 1}
    await agent.worker.stop()
    assert await agent.bench.host.unpinned("policy@3", 10.0)
