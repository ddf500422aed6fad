"""A worker in a process of its own, which measures itself: ``python -m ... CONFIG``."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI

from engines.protocol import Endpoint
from rollout.agents.model.call_forms import BY_NAME
from rollout.agents.model.families import reader_of
from rollout.config import AgentsConfig
from rollout.runtime.worker_process import tune_worker
from tests.support.agent_workers import Worker
from tests.support.watched_process import LoopWatch, WatchedProcess, answer_commands


def use_form(app: FastAPI, name: str) -> None:
    """Read the tool calls of answers in this form from now on."""
    loaded = app.state.chats._model
    assert loaded.model is not None
    reader = reader_of(loaded.model.chat, BY_NAME[name], loaded.model.reader.thinking)
    loaded.model = replace(loaded.model, reader=reader)


async def main() -> None:
    router_url, folder, config = json.loads(sys.argv[1])
    worker = Worker(AgentsConfig(**config), Path(folder))
    url = urlsplit(await worker.start(router_url))
    assert url.hostname is not None
    assert url.port is not None
    tune_worker()
    watch = LoopWatch()
    await worker.on_loop(lambda app: watch.start())

    async def carry_out(command: str, *arguments: Any) -> Any:
        assert command == "form"
        return await worker.on_loop(lambda app: use_form(app, *arguments))

    await answer_commands(Endpoint(url.hostname, url.port), watch, carry_out)
    await worker.stop()


class WorkerProcess(WatchedProcess):
    """The other side: starts it, and calls it."""

    def __init__(self, router_url: str, folder: Path, **config: Any) -> None:
        super().__init__("tests.support.agent_process", [router_url, str(folder), config])


if __name__ == "__main__":
    asyncio.run(main())
