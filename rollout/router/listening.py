"""Binding a port, and a uvicorn server that says when it listens and stops when it is told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

from rollout.errors import ConfigError


def bind(host: str, port: int, *, what: str = "router") -> socket.socket:
    """A listening socket bound to ``host`` and ``port``, for ``what``.

    Raises:
        ConfigError: it is taken, or not an address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(4096)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{what} cannot bind {host}:{port}: {error.strerror or error}; "
            "give a free port, or 0 for any",
            setting=f"{what}.port",
            value=port,
        ) from error
    listener.setblocking(False)
    return listener


class Server(uvicorn.Server):
    """uvicorn, which says when it listens and stops when told, not at its next tick."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], None],
        stop_live: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._stop_live = stop_live
        self._stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._stopping.wait()

    def stop_within(self, budget_s: float) -> None:
        # The annotation says int, but it only ever reaches asyncio.wait_for.  What is spliced
        # ends at the budget; the second more is for the control application.
        self.config.timeout_graceful_shutdown = budget_s + 1.0  # type: ignore[assignment]
        asyncio.get_running_loop().call_later(budget_s, self._stop_live)
        self._stopping.set()
