"""Agents with an OpenAI client in the session ``s`` of a worker, over engines that speak."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from rollout.config import AgentsConfig
from rollout.core.samples import Sample
from rollout.driver.client.branch_samples import branch_samples
from tests.rollout.router.conftest import (
    Bench,
    ClientReply,
    MakeBench,
    make_bench,  # noqa: F401 - a fixture
    router_config,
)
from tests.support.agent_workers import Worker
from tests.support.chat_models import speaking

USER = {"role": "user", "content": "2+2?"}


@dataclass
class Agent:
    bench: Bench
    client: openai.AsyncOpenAI
    folder: Path
    http: aiohttp.ClientSession
    worker: Worker

    @property
    def url(self) -> str:
        """Of the worker."""
        return str(self.http._base_url).rstrip("/")

    async def send(self, method: str, path: str = "/sessions/s", **options: Any) -> ClientReply:
        """The worker's reply."""
        async with self.http.request(method, path, **options) as response:
            return ClientReply(response.status, response.headers, await response.read())

    async def ask(self, messages: list[Any], **options: Any) -> Any:
        return await self.client.chat.completions.create(
            model="policy", messages=messages, **options
        )

    async def stream(self, messages: list[Any], **options: Any) -> tuple[str, list[Any], Any]:
        """The joined text, the tool calls and the last chunk with a choice."""
        text, calls, last = "", [], None
        async for part in await self.ask(messages, stream=True, **options):
            if part.choices:
                text += part.choices[0].delta.content or ""
                calls += part.choices[0].delta.tool_calls or []
                last = part
        return text, calls, last

    def num_session_bytes(self) -> int:
        """What the worker counts of its sessions."""
        return self.worker.app.state.chats.store.num_bytes

    async def turns(self) -> list[dict[str, Any]]:
        reply = await self.send("GET")
        return [] if reply.status == 404 else reply.json["turns"]

    async def samples(self) -> list[Sample]:
        return branch_samples("s", await self.turns())

    def ids(self, text: str) -> list[int]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def answer_of(reply: Any) -> dict[str, Any]:
    """The answer as an agent appends it to its history."""
    message: dict[str, Any] = reply.choices[0].message.model_dump()
    return message


MakeAgentOf = Callable[..., Awaitable[Agent]]
_SMALL = {"max_sessions": 1000, "max_session_bytes": 1 << 20}


@pytest.fixture
async def make_agent_of(make_bench: MakeBench, tmp_path: Path) -> Any:  # noqa: F811
    """Makes agents of a model's folder and what its engines say, one for each ``dies_after``."""
    ends: list[Callable[[], Awaitable[None]]] = []

    async def make(
        folder: Path,
        say: Callable[[str], str],
        *dies_after: Callable[[], int | None],
        speech: dict[str, Any] | None = None,
        router: dict[str, Any] | None = None,
        **config: Any,
    ) -> Agent:
        scripts = [
            speaking(folder, say, dies_after=one, **(speech or {}))
            for one in dies_after or [lambda: None]
        ]
        settings = router_config(tokenizer_path=str(folder), **(router or {}))
        bench = await make_bench(*scripts, config=settings)
        of_agents = AgentsConfig(**(_SMALL | {"tokenizer_path": str(folder)} | config))
        keys = {"client_key": settings.client_key, "control_key": settings.control_key}
        worker = Worker(of_agents, tmp_path / f"agents-{len(ends)}", **keys)
        url = await worker.start(bench.url)
        http = aiohttp.ClientSession(url)
        client = openai.AsyncOpenAI(base_url=f"{url}/sessions/s/v1", api_key="none", max_retries=0)
        ends.extend([client.close, http.close, worker.stop])
        return Agent(bench, client, folder, http, worker)

    yield make
    for end in ends:
        await end()
