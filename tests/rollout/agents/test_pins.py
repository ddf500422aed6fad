"""A session that stays with its version has it for all turns, whatever is pushed meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from rollout.config import AgentsConfig
from tests.rollout.agents.conftest import USER, Agent, MakeAgentOf, answer_of
from tests.support.agent_workers import worker_of_router
from tests.support.chat_models import write_chat_model
from tests.support.waits import until

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


async def test_a_session_stays_with_its_version_in_the_worker_behind_a_lost_one(
    agent: Agent, tmp_path: Path
) -> None:
    """Which pins it as it starts: no request names the session meanwhile."""
    history: list[Any] = [USER, answer_of(await agent.ask([USER], extra_body=STAYS))]
    await push(agent, 4)
    left = shutil.copytree(agent.worker.settings.folder, tmp_path / "left")
    config = AgentsConfig(tokenizer_path=str(agent.folder))
    async with worker_of_router(agent.bench.url, left, config) as url:
        await until(lambda: is_pinned(agent, 2))
        await agent.worker.stop()
        await until(lambda: is_pinned(agent, 1))
        async with openai.AsyncOpenAI(base_url=f"{url}/sessions/s/v1", api_key="none") as client:
            asked: Any = [*history, USER]
            await client.chat.completions.create(model="policy", messages=asked)
        assert sent(agent) == ["policy@3"] * 2
        async with aiohttp.request("DELETE", f"{url}/sessions/s"):
            pass
        assert await agent.bench.host.unpinned("policy@3", 10.0)
        assert not list(left.glob("*.pin"))


async def is_pinned(agent: Agent, num: int) -> bool:
    return await agent.bench.host.pinned() == {"policy@3": num}


async def test_a_worker_that_stops_pins_nothing(agent: Agent, make_agent_of: MakeAgentOf) -> None:
    await agent.ask([USER], extra_body=STAYS)
    assert await agent.bench.host.pinned() == {"policy@3": 1}
    await agent.worker.stop()
    assert await agent.bench.host.unpinned("policy@3", 10.0)
