"""The page in a thread of its own, so that it answers while the server does not.

Always true: it only asks the server, on the server's event loop, and waits for it no longer than
its deadline; after ``stop`` neither thread nor socket is left.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import psutil
import uvicorn

from engines.protocol import Endpoint
from rollout.config import PageConfig, ServerConfig
from rollout.errors import RolloutError
from rollout.observation import Observation
from rollout.page.access import Access
from rollout.page.app import page_app
from rollout.page.feed import Feed
from rollout.page.observatory import Observatory
from rollout.page.steering import Steering
from rollout.router.listening import bind
from rollout.run_folder import CONTROL_FILE, FIGURES_FILE, RunFolder

logger = logging.getLogger(__name__)

_START_S = 10.0
_STOP_S = 5.0
_MAX_HEAD_BYTES = 32 << 10
_MAX_CONNECTIONS = 256


class Seen(Protocol):
    """What the page asks of a server."""

    def observe(self, cursors: Mapping[str, int]) -> Awaitable[Observation]: ...
    def fence(self, engine_id: str, reason: str) -> Awaitable[None]: ...
    def log_tail(self, engine_id: str) -> Awaitable[str]: ...
    def stop(self) -> Awaitable[None]: ...


class PageHost:
    """Starts and stops the page of one server.

    Args:
        name: the server's.
        folder: of the server within its run; gets ``control.json``, which says where the page is,
            and ``figures.jsonl``, what drivers tell of their steps.
        router_key: what the router's metrics need.
    """

    def __init__(
        self, config: PageConfig, name: str, *, folder: Path, run_id: str, router_key: str = ""
    ) -> None:
        self._config = config
        self._name = name
        self._folder = folder
        self._run_id = run_id
        self._router_key = router_key
        self._thread: threading.Thread | None = None
        self._uvicorn: uvicorn.Server | None = None
        self._endpoint: Endpoint | None = None
        self._asked: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it is; empty before it has started."""
        return self._endpoint.url if self._endpoint else ""

    async def start(self, server: Seen) -> str:
        """Bind, serve, and say where; ``server`` is asked on this event loop.

        Raises:
            ConfigError: host and port cannot be bound.
        """
        listener = bind(self._config.host, self._config.port, what="page")
        self._endpoint = Endpoint(self._config.host, listener.getsockname()[1])
        loop = asyncio.get_running_loop()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(listener, server, loop, started),
            name=f"page-{self._endpoint.port}",
            daemon=True,
        )
        self._thread.start()
        await asyncio.wait_for(asyncio.wrap_future(started), _START_S)
        await asyncio.to_thread(self._write_control_file)
        logger.info("server %s: its page is %s", self._name, self.url)
        return self.url

    async def stop(self) -> None:
        """End it; who still watches is cut off."""
        if self._uvicorn is None or self._thread is None:
            return
        self._uvicorn.should_exit = True
        await asyncio.to_thread(self._thread.join, _STOP_S)
        (self._folder / CONTROL_FILE).unlink(missing_ok=True)

    def _run(
        self,
        listener: socket.socket,
        server: Seen,
        loop: asyncio.AbstractEventLoop,
        started: Future[None],
    ) -> None:
        try:
            asyncio.run(self._serve(listener, server, loop, started))
        except BaseException as error:
            if not started.done():
                started.set_exception(RolloutError(f"the page could not start: {error}"))
            else:
                logger.exception("server %s: its page has ended", self._name)
        finally:
            listener.close()

    async def _serve(
        self,
        listener: socket.socket,
        server: Seen,
        loop: asyncio.AbstractEventLoop,
        started: Future[None],
    ) -> None:
        def on_server(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            return lambda *args: asyncio.wrap_future(self._ask(loop, call, *args))

        def stop() -> None:
            # Not waited for: it ends this page too.
            self._ask(loop, server.stop)

        observatory = Observatory(on_server(server.observe), on_figures=self._keep_figures)
        feed = Feed(observatory)
        app = page_app(
            observatory,
            feed,
            Access(
                key=self._config.key,
                control_key=self._config.control_key,
                host=self._config.host,
            ),
            steering=Steering(on_server(server.fence), on_server(server.log_tail), stop),
            router_key=self._router_key,
            run_id=self._run_id,
        )
        self._uvicorn = _Server(
            uvicorn.Config(
                app,
                http="h11",
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
                limit_concurrency=_MAX_CONNECTIONS,
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=1,
            ),
            started,
            feed.let_go,
        )
        await self._uvicorn.serve(sockets=[listener])

    def _ask(
        self, loop: asyncio.AbstractEventLoop, call: Callable[..., Awaitable[Any]], *args: Any
    ) -> Future[Any]:
        """Begin ``call`` on the server's event loop; without one the page has no purpose."""
        answer: Future[Any] = Future()

        async def ask() -> None:
            try:
                told = await call(*args)
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(told)

        def begin() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            task = loop.create_task(ask())
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)

        try:
            # Not run_coroutine_threadsafe: a loop that closes first would leave a coroutine behind.
            loop.call_soon_threadsafe(begin)
        except RuntimeError as error:
            if self._uvicorn is not None:
                self._uvicorn.should_exit = True
            answer.set_exception(RolloutError(f"server {self._name} has ended: {error}"))
        return answer

    def _keep_figures(self, told: Mapping[str, Any]) -> None:
        try:
            with (self._folder / FIGURES_FILE).open("a") as lines:
                lines.write(json.dumps(told) + "\n")
        except OSError as error:
            logger.error("server %s: figures are not kept: %s", self._name, error)

    def _write_control_file(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        told = {
            "server": self._name,
            "run_id": self._run_id,
            "url": self.url,
            "needs_key": bool(self._config.key),
            "pid": os.getpid(),
            "began_s": psutil.Process().create_time(),
        }
        part = self._folder / f".{CONTROL_FILE}.{os.getpid()}"
        part.write_text(json.dumps(told, indent=1) + "\n")
        part.replace(self._folder / CONTROL_FILE)


def page_of(config: ServerConfig, run: RunFolder, name: str) -> PageHost | None:
    """The page of a server, not started; None where none is wanted."""
    if not config.page.enabled:
        return None
    return PageHost(
        config.page,
        name,
        folder=run.of_server(name),
        run_id=run.run_id,
        router_key=config.router.control_key or config.router.client_key,
    )


class _Server(uvicorn.Server):
    """uvicorn, which says when it listens, and lets go of those who only listen when it ends."""

    def __init__(
        self, config: uvicorn.Config, started: Future[None], let_go: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._started = started
        self._let_go = let_go

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started.set_result(None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._let_go()
        await super().shutdown(sockets)

    def install_signal_handlers(self) -> None:
        """None: signals are the business of whoever owns the process."""
