"""Kept connections to every engine, and the making of new ones.

Always true: no more are open than are allowed; each is idle in here, or carries a request.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable

from engines.protocol import Endpoint
from rollout.router.heads import KnownHeads, ReplyHead
from rollout.router.pace import Pace
from rollout.router.upstream import Connection, Outgoing, Sender, describe

KEEPALIVE_S = 4.0
"""Less than SGLang keeps its side (5 s), so that few connections close under a new request."""

_OUR_OWN_LIMITS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)

logger = logging.getLogger(__name__)


class _Connecting:
    """A request whose connection is being made."""

    def __init__(self) -> None:
        self.is_dropped = False
        self.task: asyncio.Task[None] | None = None

    def drop(self) -> None:
        self.is_dropped = True
        if self.task is not None:
            self.task.cancel()

    def pause(self) -> None:
        """There is nothing to pause yet."""

    def resume(self) -> None:
        """Nor to resume."""


class Pool:
    """Kept connections to every engine; call it from one event loop.

    Args:
        connect_timeout_s: until a connection stands.
        max_connections: open ones, idle or not; a request that needs one more fails.
    """

    def __init__(self, *, connect_timeout_s: float, max_connections: int) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._max_connections = max_connections
        self._open: set[Connection] = set()
        self._idle: dict[Endpoint, dict[Connection, None]] = {}  # the longest idle first
        self._tasks: set[asyncio.Task[None]] = set()
        self.known_heads: KnownHeads[ReplyHead] = KnownHeads()
        self.now_s: Callable[[], float] = lambda: 0.0
        self.pace = Pace(lambda rest: None)

    def open(self) -> None:
        loop = asyncio.get_running_loop()
        self.now_s = loop.time
        self.pace = Pace(loop.call_soon)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for connection in list(self._open):
            connection.close()

    def send(
        self, sender: Sender, endpoint: Endpoint, parts: list[bytes], *, is_head: bool = False
    ) -> None:
        """Send ``parts`` to ``endpoint``; ``sender.upstream`` is what it can be dropped by."""
        outgoing = Outgoing(endpoint, parts, is_head)
        idle = self._idle.get(endpoint)
        while idle:
            connection, _ = idle.popitem()
            if connection.is_usable:
                connection.send(sender, outgoing, self.now_s())
                return
        self.send_anew(sender, outgoing)

    def send_anew(self, sender: Sender, outgoing: Outgoing) -> None:
        """Send on a connection of its own."""
        connecting = _Connecting()
        sender.upstream = connecting
        task = asyncio.get_running_loop().create_task(self._connect(sender, outgoing, connecting))
        connecting.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, sender: Sender, outgoing: Outgoing, connecting: _Connecting) -> None:
        endpoint = outgoing.endpoint
        try:
            connection = await self._new_connection(endpoint)
        except OSError as error:
            if connecting.is_dropped:
                return
            sender.upstream = None
            if error.errno in _OUR_OWN_LIMITS:
                logger.warning("no connection to %s: %s", endpoint.url, error)
                sender.on_no_connection(f"the router cannot open a connection: {error}")
            else:
                sender.on_upstream_lost(f"cannot connect: {describe(error)}")
            return
        if connecting.is_dropped:
            connection.close()
        else:
            connection.send(sender, outgoing, self.now_s())

    async def _new_connection(self, endpoint: Endpoint) -> Connection:
        if len(self._open) >= self._max_connections and not self._close_an_idle_one():
            message = f"all {self._max_connections} connections to engines are in use"
            raise OSError(errno.EMFILE, message)
        connection = Connection(self, endpoint)
        self._open.add(connection)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, endpoint.host, endpoint.port
                )
        except BaseException as error:
            connection.close()
            self.forget(connection)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no connection in {self._connect_timeout_s} s") from None
            raise
        return connection

    def _close_an_idle_one(self) -> bool:
        for idle in self._idle.values():
            if idle:
                connection = next(iter(idle))
                del idle[connection]
                self._open.discard(connection)
                connection.close()
                return True
        return False

    def keep(self, connection: Connection) -> None:
        """It is idle now."""
        connection.idle_since_s = self.now_s()
        self._idle.setdefault(connection.endpoint, {})[connection] = None

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self._open.discard(connection)
        idle = self._idle.get(connection.endpoint)
        if idle is None:
            return
        idle.pop(connection, None)
        if not idle:
            del self._idle[connection.endpoint]

    def sweep(self) -> None:
        """Close what has been idle for too long."""
        too_old_s = self.now_s() - KEEPALIVE_S
        for idle in list(self._idle.values()):
            while idle and (oldest := next(iter(idle))).idle_since_s < too_old_s:
                del idle[oldest]
                oldest.close()

    @property
    def num_open(self) -> int:
        return len(self._open)
