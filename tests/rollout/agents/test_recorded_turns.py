"""Chats whose session's file cannot be written or read."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from rollout.agents.turns.tree import TurnTree
from tests.rollout.agents.conftest import USER, Agent, MakeAgentOf, answer_of
from tests.support.chat_models import write_chat_model

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


@pytest.fixture
def make_agent(make_agent_of: MakeAgentOf, tmp_path: Path) -> Any:
    return partial(make_agent_of, write_chat_model(tmp_path / "model"), lambda prompt: "answer")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_cannot_be_written_fails_and_the_next_one_does_not(
    make_agent: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    agent: Agent = await make_agent()
    answer = answer_of(await agent.ask([USER]))

    def is_full(descriptor: int, pieces: list[bytes]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "writev", is_full)
        with pytest.raises(openai.APIError, match="No space left on device") as failed:
            await (agent.stream([USER, answer, USER]) if stream else agent.ask([USER]))
        assert isinstance(failed.value.body, dict)
        assert failed.value.body["type"] == "not_recorded"
    assert len(await agent.turns()) == 1
    reply = await agent.ask([USER, answer, USER])
    assert (reply.session["turn"], reply.session["parent"]) == (1, 0)


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"drift", b"Drift", 1))


async def test_a_damaged_session_is_refused_in_words(make_agent: Any) -> None:
    agent: Agent = await make_agent()
    for _ in range(2):
        await agent.ask([USER])
    store = agent.worker.app.state.chats.store
    session = await store.get("s")
    session.tree, session.is_loaded = TurnTree(), False  # as behind a restart
    path = Path(store._files.path_of(session.digest))
    damage(path)
    with pytest.raises(openai.APIStatusError, match=f"{path}, line 2") as refused:
        await agent.ask([USER])
    assert refused.value.status_code == 410
    asked = await agent.send("GET")
    assert (asked.status, asked.json["error"]["type"]) == (410, "session_unreadable")
    assert (await agent.send("DELETE")).status == 200
