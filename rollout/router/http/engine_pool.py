"""Idle connections to every engine, and new ones when none is idle.

Always true: at most ``max_connections`` are open; each is idle in the pool or carries a request.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from collections.abc import Callable
from typing import NamedTuple

from engines.process.background import start_task
from engines.protocol import Endpoint
from engines.protocol.plain_text import describe
from rollout.router.http.engine_connection import (
    EngineConnection,
    OutgoingRequest,
    ReplyHandler,
)
from rollout.router.http.fast_json import Data
from rollout.router.http.head_cache import HeadCache, ReplyHead
from rollout.router.http.read_pacing import ReadPacing

KEEPALIVE_S = 4.0
"""Less than SGLang keeps its side (5 s), so that few connections close under a new request."""
_FRESH_S = 0.5
"""No engine closes a connection that is idle for less, so it is used without a look at it."""
_RESERVED_FDS = 128
_LIMITS_OF_THIS_PROCESS = frozenset(
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
        """No reply can come yet."""

    def resume(self) -> None:
        """No reply can come yet."""


class EnginePool:
    """Connections to every engine; called from one event loop.

    Args:
        connect_timeout_s: until a connection is established.
        max_connections: open connections, idle or not; a request that needs one more fails.
    """

    def __init__(self, *, connect_timeout_s: float, max_connections: int) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._max_connections = max_connections
        self._open: set[EngineConnection] = set()
        self._idle: dict[Endpoint, dict[EngineConnection, None]] = {}  # longest idle first
        self._tasks: set[asyncio.Task[None]] = set()
        self.head_cache: HeadCache[ReplyHead] = HeadCache()
        self.now_s: Callable[[], float] = lambda: 0.0
        self.read_pacing = ReadPacing(lambda rest: None)

    def open(self) -> None:
        loop = asyncio.get_running_loop()
        self.now_s = loop.time
        self.read_pacing = ReadPacing(loop.call_soon)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for connection in list(self._open):
            connection.close()

    def send(
        self,
        handler: ReplyHandler,
        endpoint: Endpoint,
        parts: list[Data],
        *,
        is_head: bool = False,
    ) -> None:
        """Send ``parts`` to ``endpoint``; ``handler.upstream`` can drop the request."""
        outgoing = OutgoingRequest(endpoint, parts, is_head)
        idle = self._idle.get(endpoint)
        now_s = self.now_s()
        while idle:
            connection, _ = idle.popitem()
            try:
                if connection.is_usable and not _may_be_closed(connection, now_s):
                    connection.send(handler, outgoing, now_s)
                    return
                connection.close()
            except Exception:
                connection.close()
                raise
        self.send_on_new_connection(handler, outgoing)

    def send_on_new_connection(self, handler: ReplyHandler, outgoing: OutgoingRequest) -> None:
        """Send on a new connection."""
        connecting = _Connecting()
        handler.upstream = connecting
        task = start_task(self._connect(handler, outgoing, connecting), "router-connect")
        connecting.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(
        self, handler: ReplyHandler, outgoing: OutgoingRequest, connecting: _Connecting
    ) -> None:
        try:
            await self._connect_and_send(handler, outgoing, connecting)
        except Exception as error:
            if not connecting.is_dropped:
                handler.on_router_error(error)

    async def _connect_and_send(
        self, handler: ReplyHandler, outgoing: OutgoingRequest, connecting: _Connecting
    ) -> None:
        endpoint = outgoing.endpoint
        try:
            connection = await self._new_connection(endpoint)
        except OSError as error:
            if connecting.is_dropped:
                return
            connecting.task = None  # this one; ``handler.upstream`` shows that nothing was sent
            if error.errno in _LIMITS_OF_THIS_PROCESS:
                logger.warning("no connection to %s: %s", endpoint.url, error)
                handler.on_no_connection(f"the router cannot open a connection: {error}")
            else:
                why = f"cannot connect: {describe(error, with_type=True)}"
                handler.on_engine_lost(why, was_sent=False)
            return
        try:
            if connecting.is_dropped:
                connection.close()
            else:
                connection.send(handler, outgoing, self.now_s())
        except Exception:
            connection.close()
            raise

    async def _new_connection(self, endpoint: Endpoint) -> EngineConnection:
        if len(self._open) >= self._max_connections and not self._close_an_idle_one():
            message = f"all {self._max_connections} connections to engines are in use"
            raise OSError(errno.EMFILE, message)
        connection = EngineConnection(self, endpoint)
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

    def keep(self, connection: EngineConnection) -> None:
        """Keep a connection that is idle now."""
        connection.idle_since_s = self.now_s()
        self._idle.setdefault(connection.endpoint, {})[connection] = None

    def forget(self, connection: EngineConnection) -> None:
        """Remove a closed connection."""
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


def _may_be_closed(connection: EngineConnection, now_s: float) -> bool:
    """Whether its engine may have closed it, although this process has not read that yet.

    A process that is late has read the end of the last reply late, too, so the clock of the engine
    may be ahead by as much.
    """
    idle_s = now_s - connection.idle_since_s
    return idle_s > KEEPALIVE_S or (idle_s > _FRESH_S and connection.has_something_to_read)


_FEW = 1024


class Connections(NamedTuple):
    """How many connections a limit of open files allows.

    Attributes:
        engines: to engines.
        clients: of clients, beside these.
    """

    engines: int
    clients: int


def connections_within(wanted: int, soft: int, hard: int) -> tuple[int, Connections]:
    """The soft limit to set, and the connections that it allows.

    A request in flight needs two descriptors: one to its client, one to its engine.
    """
    needed = 2 * wanted + _RESERVED_FDS
    limit = soft if needed <= soft else min(needed, hard)
    num_engines = min(wanted, max(1, (limit - _RESERVED_FDS) // 2))
    return limit, Connections(num_engines, max(1, limit - _RESERVED_FDS - num_engines))


def check_file_descriptors(max_connections: int, *, is_default: bool = False) -> Connections:
    """Raise this process's limit as far as needed and allowed; how many connections that makes.

    Args:
        is_default: the setting has its default, so fewer are only logged if they are very few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = 1 << 40
    has = [infinite if num == resource.RLIM_INFINITY else num for num in (soft, hard)]
    limit, allowed = connections_within(max_connections, *has)
    if limit != has[0]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if allowed.engines < (min(_FEW, max_connections) if is_default else max_connections):
        logger.warning(
            "the limit of %d open files allows %d connections to engines, not %d; "
            "raise it (ulimit -Hn) or lower router.max_connections",
            limit,
            allowed.engines,
            max_connections,
        )
    return allowed
