"""uvicorn's server for an event loop of ours: it reports when it listens, and stops when requested.

Always true: it leaves signals to the owner of the process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

_CLIENT_KEEPALIVE_S = 75
_DATE_EVERY_S = 1.0
_POLL_S = 0.01


def _nothing() -> None: ...


def traffic_config(app: Any, **options: Any) -> uvicorn.Config:
    """The settings of a server for generation traffic: no log, no extra headers, many clients.

    Args:
        app: an ASGI application.
        options: more of uvicorn's settings.
    """
    return uvicorn.Config(
        app,
        ws="none",
        lifespan="on",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        date_header=False,
        backlog=4096,
        timeout_keep_alive=_CLIENT_KEEPALIVE_S,
        **options,
    )


class HttpServer(uvicorn.Server):
    """One server.

    Args:
        on_stopping: called when it is requested to stop, before it closes connections.

    Attributes:
        on_started: called when it listens.
    """

    def __init__(
        self, config: uvicorn.Config, *, on_stopping: Callable[[], None] = _nothing
    ) -> None:
        super().__init__(config)
        self.on_started: Callable[[], None] = _nothing
        self._on_stopping = on_stopping
        self._stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    async def main_loop(self) -> None:
        """Unlike uvicorn's, wakes only where replies have a date, and ends at once."""
        interval_s = _DATE_EVERY_S if self.config.date_header else None
        while not self._stopping.is_set():
            await self.on_tick(0)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), interval_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Unlike uvicorn's, does not wait a tenth of a second where nothing is under way."""
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                # uvicorn has no event for the end of the last one.
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel("the server has stopped")
        await self.lifespan.shutdown()

    def stop(self, graceful_s: float) -> None:
        """Refuse connections, give requests so long to end, cancel the rest; on its event loop."""
        # The annotation says int, but it only ever reaches asyncio.timeout.
        self.config.timeout_graceful_shutdown = graceful_s  # type: ignore[assignment]
        self._on_stopping()
        self._stopping.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield
