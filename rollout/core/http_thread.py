"""An HTTP server on an event loop of its own, in a thread of its own.

Always true: work on the caller's loop never delays a request, and requests never delay the caller;
after ``stop`` neither thread nor socket remains.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from engines.http.uvicorn_server import HttpServer
from engines.process.background import Then, keep_thread
from engines.protocol import Endpoint
from rollout.core.errors import ConfigError, RolloutError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# While it makes routes, FastAPI changes the warning filters of the process: two threads that do so
# at once would keep each other's.
_MAKING = threading.Lock()


class HttpThread:
    """Starts, calls and stops one server.

    Args:
        what: names it in errors and logs, and is the slice of the configuration with its port.
        loop_factory: makes its event loop; None takes asyncio's.

    Attributes:
        then: what follows when the server fails after it has started.
    """

    def __init__(
        self, what: str, *, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    ) -> None:
        self._what = what
        self.then = Then.IS_OVER
        self._loop_factory = loop_factory
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: HttpServer | None = None
        self._calls: set[Future[Any]] = set()
        self._started: Future[None] = Future()
        # A caller that gives up waiting must not cancel it: the thread sets its result.
        self._started.set_running_or_notify_cancel()
        self._ended: Future[None] = Future()

    @property
    def is_running(self) -> bool:
        """Whether it has begun to serve and has not ended."""
        return self._server is not None and not self._ended.done()

    async def start(
        self,
        host: str,
        port: int,
        make: Callable[[], HttpServer],
        timeout_s: float | None = None,
        *,
        listener: socket.socket | None = None,
    ) -> Endpoint:
        """Bind and serve.

        Args:
            make: makes the server; called on the thread's event loop.
            listener: that is bound to ``host`` already, as by ``bind``; the thread closes it.

        Returns:
            Where it listens.

        Raises:
            ConfigError: host and port cannot be bound.
            RolloutError: it could not start, or was started before.
            TimeoutError: it did not start in time.
        """
        if self._thread is not None:
            raise RolloutError(f"the {self._what} is started once")
        listener = listener or bind(host, port, what=self._what)
        endpoint = Endpoint(host, listener.getsockname()[1])
        self._thread = keep_thread(
            partial(self._run, listener, make), f"{self._what}-{endpoint.port}", self.then
        )
        await asyncio.wait_for(asyncio.wrap_future(self._started), timeout_s)
        return endpoint

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work`` on the server's event loop.

        Raises:
            RolloutError: the server is not running, or ended before ``work`` did.
        """
        if self._loop is None or self._ended.done():
            work.close()
            raise RolloutError(f"the {self._what} is not running")
        try:
            call = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # its loop was closed since
            work.close()
            raise RolloutError(f"the {self._what} is not running") from None
        self._calls.add(call)
        if self._ended.done():
            call.cancel()
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RolloutError(f"the {self._what} stopped before it could answer") from None
        finally:
            self._calls.discard(call)

    def request_stop(self, graceful_s: float) -> None:
        """Begin to stop, from any thread; see ``HttpServer.stop``."""
        if self._loop is not None and self._server is not None:
            with suppress(RuntimeError):  # its loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._server.stop, graceful_s)

    async def stop(self, graceful_s: float, *, timeout_s: float) -> None:
        """Stop, and wait until the thread has ended.

        Args:
            graceful_s: for requests in flight to end.

        Raises:
            TimeoutError: the thread did not end in time.
        """
        if self._thread is None or not self.is_running:
            return
        self.request_stop(graceful_s)
        await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._ended)), timeout_s)
        self._thread.join()

    def _run(self, listener: socket.socket, make: Callable[[], HttpServer]) -> None:
        try:
            with asyncio.Runner(loop_factory=self._loop_factory) as runner:
                runner.run(self._serve(listener, make))
        except BaseException as error:
            if self._started.done():
                raise
            logger.exception("the %s could not start", self._what)
            reason = RolloutError(
                f"the {self._what} could not start: {type(error).__name__}: {error}"
            )
            reason.__cause__ = error
            self._started.set_exception(reason)
        finally:
            listener.close()
            self._ended.set_result(None)
            for call in list(self._calls):
                call.cancel()

    async def _serve(self, listener: socket.socket, make: Callable[[], HttpServer]) -> None:
        self._loop = asyncio.get_running_loop()
        with _MAKING:
            self._server = make()
        self._server.on_started = lambda: self._started.set_result(None)
        await self._server.serve(sockets=[listener])


def bind(host: str, port: int, *, what: str) -> socket.socket:
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
            f"set {what}.port of this server to a free port, or to 0 for any",
            setting=f"{what}.port",
            value=port,
        ) from error
    listener.setblocking(False)
    return listener
