"""What clients name in chats: what a worker keeps of it, answers to it and logs of it."""

from __future__ import annotations

import gc
import json
import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.rollout.agents.conftest import Agent, MakeAgentOf
from tests.support.chat_models import write_chat_model

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

HOSTILE = "\r\nERROR forged \x1b[31m"
LONGEST_ERROR, LONGEST_LINE, MOST_KEPT = 2048, 1024, 2 << 20
CHAT = {"messages": [{"role": "user", "content": "a"}]}
PATH = "/sessions/s/v1/chat/completions"

Sent = tuple[str, str, Any]


def field(name: str) -> Callable[[str], Sent]:
    return lambda value: ("POST", PATH, {**CHAT, name: value})


NAMED: dict[str, Callable[[str], Sent]] = {
    "session to delete": lambda value: ("DELETE", f"/sessions/{quote(value, safe='')}", None),
    "session to read": lambda value: ("GET", f"/sessions/{quote(value, safe='')}", None),
    "session of a chat": lambda value: (
        "POST",
        f"/sessions/{quote(value, safe='')}/v1/chat/completions",
        CHAT,
    ),
    "session of a completion": lambda value: (
        "POST",
        f"/sessions/{quote(value, safe='')}/v1/completions",
        {},
    ),
    "path": lambda value: ("GET", f"/{quote(value, safe='')}", None),
    "role": lambda value: ("POST", PATH, {"messages": [{"role": value}]}),
    "content": lambda value: ("POST", PATH, {"messages": [{"role": "user", "content": [value]}]}),
    "tool choice": field("tool_choice"),
    "tools": field("tools"),
    "stop string": field("stop"),
    "response format": field("response_format"),
    "option of the template": lambda value: (
        "POST",
        PATH,
        {**CHAT, "chat_template_kwargs": {value: 1, "messages": 1}},
    ),
    "model": field("model"),
    "adapter": field("lora_path"),
    "contract": field("min_weight_version"),
}


@pytest.fixture
async def agent(make_agent_of: MakeAgentOf, tmp_path: Path) -> Agent:
    return await make_agent_of(write_chat_model(tmp_path / "model"), lambda prompt: "yes")


async def send(agent: Agent, sent: Sent) -> None:
    """Send a request.  An error is short, with no characters that a terminal or a log obeys."""
    method, path, body = sent
    reply = await agent.send(method, path, **({} if body is None else {"json": body}))
    agent.bench.engines[0].seen.clear()
    if reply.status >= 400:
        assert len(reply.body) < LONGEST_ERROR, reply.body[:300]
        assert all(byte >= 32 for byte in reply.body), reply.body[:300]


@pytest.mark.parametrize("what", NAMED)
async def test_lines_and_errors_are_short_and_nothing_is_kept(
    what: str, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="rollout")
    is_in_head = what.startswith(("session", "path"))
    longest = 50_000 if is_in_head else 1 << 18
    for value in (HOSTILE, HOSTILE + "v" * longest):
        await send(agent, NAMED[what](value))
    tracemalloc.start()
    try:
        before = _traced()
        for number in range(30):
            await send(agent, NAMED[what](f"{number:06d}".ljust(longest, "v")))
        grown = _traced() - before
    finally:
        tracemalloc.stop()
    assert grown < MOST_KEPT + agent.num_session_bytes()
    for record in caplog.records:
        line = record.getMessage() + json.dumps(getattr(record, "rid", ""))
        assert line.isprintable(), line[:300]
        assert len(line) < LONGEST_LINE, line[:300]


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
