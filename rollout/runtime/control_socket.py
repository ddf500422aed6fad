"""Calls of the servers of a local run, from other processes: trainer ranks, a notebook.

    caller   -> (server, method, arguments, keyword arguments)
    listener -> None, every few seconds while the call runs
    listener -> (result, None) or (None, error)

Always true: both sides check that the other has the run's key before anything is unpickled;
only commands of ``RolloutServer`` can be called; a caller waits as long as the listener lives,
and no longer; a call that was received runs to its end, also if its caller has ended.
"""

from __future__ import annotations

import inspect
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Concatenate, ParamSpec, TypeVar

from engines.protocol.plain_text import describe
from rollout.control.server.server import RolloutServer
from rollout.core.errors import ActorLost, ConfigError
from rollout.core.pending import LoopThread, Pending
from rollout.runtime.calls.caller import LAUNCH_NODE, node_without_ray
from rollout.weights.push.weight_push import WeightPush

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_HANDSHAKE_S = 10.0
_SIGN_OF_LIFE_S = 5.0
_SILENCE_S = 60.0
_MOST_CALLS = 256
_NOT_FOR_CALLERS = frozenset({"start", "stop"})


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """Where the process that launched a run listens.

    Attributes:
        key: a secret; with it, code can be run as the user who launched the run.
    """

    host: str
    port: int
    key: str


class ControlListener:
    """Accepts calls for these servers, each in a thread of its own."""

    def __init__(
        self, loop: LoopThread, servers: Mapping[str, RolloutServer], host: str = "127.0.0.1"
    ) -> None:
        self._loop = loop
        self._servers = servers
        self._socket = socket.create_server((host, 0))
        self._slots = threading.BoundedSemaphore(_MOST_CALLS)
        self.address = ControlAddress(host, self._socket.getsockname()[1], secrets.token_hex(32))
        self._thread = threading.Thread(target=self._accept, name="control-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more calls; those that run end with their commands."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_HANDSHAKE_S)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(accepted,), name="control-call", daemon=True
            ).start()

    def _serve(self, accepted: socket.socket) -> None:
        try:
            with _connection(accepted) as connection:
                key = self.address.key.encode()
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
                _set_receive_timeout(connection, 0)
                self._answer(connection)
        except AuthenticationError:
            logger.warning("a caller with a wrong key was refused")
        except (OSError, EOFError):
            pass  # the caller has ended
        finally:
            self._slots.release()

    def _answer(self, connection: Connection) -> None:
        try:
            pending = self._call(*connection.recv())
            while (ended := _ended_within(pending, _SIGN_OF_LIFE_S)) is None:
                connection.send(None)
            connection.send(ended)
        except (OSError, EOFError):
            raise
        except Exception as error:  # the request or the result cannot be pickled
            connection.send((None, ConfigError(f"this call is not possible: {describe(error)}")))

    def _call(self, server: str, method: str, args: Any, kwargs: Any) -> Pending[Any]:
        if not server:
            names: Future[list[str]] = Future()
            names.set_result(list(self._servers))
            return Pending(names)
        command = getattr(RolloutServer, method, None)
        if method.startswith("_") or method in _NOT_FOR_CALLERS:
            command = None
        if not inspect.iscoroutinefunction(command):
            raise ConfigError(f"{method!r} is not a command of a server")
        return self._loop.submit(command(self._servers[server], *args, **kwargs))


class SocketCaller:
    """Calls a server of a local run from another process; see ``calls.caller.Caller``."""

    backend = "local"

    def __init__(self, address: ControlAddress, server: str) -> None:
        self._address = address
        self._server = server

    def call(
        self,
        method: Callable[Concatenate[RolloutServer, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[T]:
        return self.request(method.__name__, args, kwargs)

    def request(self, method: str, args: Any = (), kwargs: Any = ()) -> Pending[Any]:
        """Send one request, in a thread."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result, error = self._exchange((self._server, method, args, dict(kwargs)))
            except BaseException as failed:
                future.set_exception(failed)
            else:
                future.set_exception(error) if error is not None else future.set_result(result)

        threading.Thread(target=run, name=f"call-{method}", daemon=True).start()
        return Pending(future)

    def _exchange(self, request: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
        address, key = self._address, self._address.key.encode()
        try:
            opened = socket.create_connection((address.host, address.port), _HANDSHAKE_S)
            with _connection(opened) as connection:
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
                _set_receive_timeout(connection, 0)
                connection.send(request)
                while connection.poll(_SILENCE_S):
                    if (ended := connection.recv()) is not None:
                        result, error = ended
                        return result, error
                raise TimeoutError(f"no sign of life within {_SILENCE_S:g} s")
        except AuthenticationError:
            raise ConfigError(
                f"{address.host}:{address.port} refused the key; it changes with each launch"
            ) from None
        except (OSError, EOFError) as error:
            raise ActorLost(
                f"server {self._server or 'of the run'}: the process that launched it, at "
                f"{address.host}:{address.port}, does not answer: {describe(error)}",
                actor=self._server,
            ) from None

    def ship(self, push: WeightPush) -> WeightPush:
        return push

    def node_of(self, node_id: str, host: str) -> str:
        return node_without_ray(host)

    def own_node(self) -> str:
        own = self.own_host()
        return LAUNCH_NODE if own == "127.0.0.1" else f"trainer {own}"

    def own_host(self) -> str:
        """The address of this machine on the way to the listener."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((self._address.host, self._address.port))  # sends nothing
            return str(route.getsockname()[0])


def _connection(opened: socket.socket) -> Connection:
    opened.settimeout(None)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection = Connection(opened.detach())
    _set_receive_timeout(connection, _HANDSHAKE_S)
    return connection


def _set_receive_timeout(connection: Connection, seconds: float) -> None:
    """For reads that block in the handshake; 0 for none."""
    with socket.socket(fileno=connection.fileno()) as view:
        view.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))
        view.detach()


def _ended_within(pending: Pending[Any], seconds: float) -> tuple[Any, BaseException | None] | None:
    """Result and error of a call; None while it runs."""
    try:
        return pending.result(seconds), None
    except (TimeoutError, FutureTimeout) as error:
        return (None, error) if pending.done() else None
    except Exception as error:
        return None, error
