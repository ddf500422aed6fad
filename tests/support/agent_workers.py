"""Workers of the agents' program in threads of a test, in front of a router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvicorn
import uvloop
from fastapi import FastAPI

from engines.http.uvicorn_server import HttpServer
from rollout.agents.worker.app import agents_app
from rollout.agents.worker.settings import WorkerSettings
from rollout.config import AgentsConfig
from rollout.core.http_thread import HttpThread

T = TypeVar("T")


class Worker:
    """One worker.

    Attributes:
        app: its application, once it has started.

    Args:
        more: its settings that are not as those of the only worker.
    """

    def __init__(self, config: AgentsConfig, folder: Path, **more: Any) -> None:
        settings = {"number": 0, "num_workers": 1} | more
        self.settings = WorkerSettings(config, folder=str(folder), **settings)
        self._thread = HttpThread("agents", loop_factory=uvloop.new_event_loop)

    async def start(self, router_url: str) -> str:
        """Its base URL."""

        def make() -> HttpServer:
            self.app = agents_app(self.settings, router_url)
            # As in ``AgentsHost``: with uvicorn's 5 s a busy machine would find it closed.
            options: Any = {"timeout_keep_alive": 75, "lifespan": "on", "ws": "none"}
            return HttpServer(
                uvicorn.Config(self.app, access_log=False, log_config=None, **options)
            )

        return (await self._thread.start("127.0.0.1", 0, make)).url

    async def on_loop(self, act: Callable[[FastAPI], T]) -> T:
        """What ``act`` returns, which gets the application on its event loop."""

        async def work() -> T:
            assert self._thread._server is not None
            return act(self._thread._server.config.app)

        return await self._thread.call(work())

    async def stop(self) -> None:
        await self._thread.stop(0.0, timeout_s=10.0)


@asynccontextmanager
async def worker_of_router(
    router_url: str, folder: Path, config: AgentsConfig | None = None, **more: Any
) -> AsyncIterator[str]:
    """The base URL of the only worker in front of a router."""
    worker = Worker(config or AgentsConfig(), folder, **more)
    try:
        yield await worker.start(router_url)
    finally:
        await worker.stop()


def worker_processes() -> list[psutil.Process]:
    """Of the workers that this process has started, without Ray."""
    children = psutil.Process().children(recursive=True)
    return [one for one in children if "rollout.runtime.agents_program" in one.cmdline()]
