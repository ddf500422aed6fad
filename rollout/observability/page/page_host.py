"""Runs the page in its own thread, so that it answers while the server does not.

Always true: the page calls the server only on the server's event loop, and waits for it no longer
than a deadline; ``stop`` ends the thread and closes the socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import uvicorn

from engines.http.uvicorn_server import HttpServer
from engines.process.background import start_task
from rollout.config import ServerConfig
from rollout.config.run_dir import RunFolder
from rollout.core.errors import RolloutError
from rollout.core.http_thread import HttpThread
from rollout.observability.page.access import Access
from rollout.observability.page.actions import ServerActions
from rollout.observability.page.app import page_app
from rollout.observability.page.engine_loads import EngineLoads
from rollout.observability.page.event_stream import EventStream
from rollout.observability.page.runs import RunsOfHost
from rollout.observability.page.state_cache import StateCache
from rollout.observability.server_snapshot import ServerSnapshot
from rollout.observability.step_reports import ReportFile
from rollout.observability.timeline.span import Cursor

logger = logging.getLogger(__name__)

_START_S = 10.0
_STOP_S = 5.0
# For the last refresh, before the router stops.
_LAST_S = 2.0
# For requests in flight.
_GRACEFUL_S = 1.0
_MAX_HEAD_BYTES = 32 << 10
_MAX_CONNECTIONS = 256


class ObservedServer(Protocol):
    """The functions of a server that the page calls."""

    def observe(self, cursors: Mapping[str, Cursor]) -> Awaitable[ServerSnapshot]: ...
    def fence(self, engine_id: str, reason: str) -> Awaitable[None]: ...
    def log_tail(self, engine_id: str, num_lines: int) -> Awaitable[str]: ...
    def stop(self) -> Awaitable[None]: ...


class PageHost:
    """Starts and stops the page of one server.

    Args:
        run: in the server's folder within it, the page writes ``figures.jsonl`` with the figures
            that drivers report for each step.
    """

    def __init__(self, config: ServerConfig, run: RunFolder, name: str) -> None:
        self._config = config.page
        self._name = name
        self._run = run
        self._reports = ReportFile(run.of_server(name), run.last_launch())
        self._router_key = config.router.control_key or config.router.client_key
        self._thread = HttpThread("page")
        self._url = ""
        self._cache: StateCache | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def start(self, server: ObservedServer) -> str:
        """Bind the address, start to serve and return the URL.

        Args:
            server: its functions are called on the current event loop.

        Raises:
            ConfigError: host and port cannot be bound.
            RolloutError: it could not start.
        """
        make = partial(self._make_server, server, asyncio.get_running_loop())
        endpoint = await self._thread.start(self._config.host, self._config.port, make, _START_S)
        self._url = endpoint.url
        logger.info("server %s: its page is at %s", self._name, self._url)
        return self._url

    async def keep_figures(self) -> None:
        """Write what drivers reported since the last refresh; only while the router runs."""
        if self._cache is None:
            return
        with suppress(RolloutError, TimeoutError):
            async with asyncio.timeout(_LAST_S):
                await self._thread.call(self._cache.refresh())

    async def stop(self) -> None:
        """Stop the page and disconnect its clients."""
        if not self._url:
            return
        with suppress(TimeoutError):
            await self._thread.stop(_GRACEFUL_S, timeout_s=_STOP_S)

    def _make_server(self, server: ObservedServer, loop: asyncio.AbstractEventLoop) -> HttpServer:
        def on_server(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            return lambda *args: asyncio.wrap_future(self._call(loop, call, *args))

        def stop() -> None:
            # Not awaited, because it also stops this page.
            self._call(loop, server.stop)

        config = self._config
        cache = self._cache = StateCache(
            on_server(server.observe),
            on_figures=self._write_figures,
            reports=self._recorded(),
            loads=EngineLoads(),
        )
        stream = EventStream(cache)
        app = page_app(
            cache,
            stream,
            Access(key=config.key, control_key=config.control_key, host=config.host),
            actions=ServerActions(on_server(server.fence), on_server(server.log_tail), stop),
            runs=RunsOfHost(self._run, self._name, config.key),
            router_key=self._router_key,
            run=self._run,
        )
        return HttpServer(
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
            ),
            on_stopping=stream.disconnect_all,
        )

    def _call(
        self, loop: asyncio.AbstractEventLoop, function: Callable[..., Awaitable[Any]], *args: Any
    ) -> Future[Any]:
        """Start ``function`` on the server's event loop; if that is closed, stop the page."""
        result: Future[Any] = Future()

        async def run() -> None:
            try:
                value = await function(*args)
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(value)

        def begin() -> None:
            if not result.set_running_or_notify_cancel():
                return
            task = start_task(run(), "page-call")
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

        try:
            # Not run_coroutine_threadsafe: a loop that closes first would leave a coroutine behind.
            loop.call_soon_threadsafe(begin)
        except RuntimeError as error:
            self._thread.request_stop(_GRACEFUL_S)
            result.set_exception(RolloutError(f"server {self._name} has stopped: {error}"))
        return result

    def _recorded(self) -> Sequence[Mapping[str, Any]]:
        """What a process of this server, which was lost, has written in this launch."""
        try:
            return self._reports.read()
        except OSError as error:
            logger.error("server %s: cannot read its figures: %s", self._name, error)
            return ()

    def _write_figures(self, figures: Mapping[str, Any]) -> None:
        try:
            self._reports.append(figures)
        except OSError as error:
            logger.error("server %s: cannot write figures: %s", self._name, error)
