"""Calls of the servers of a local run, from other processes: trainer ranks, a notebook.

    caller   -> (server, method, arguments, keyword arguments, traceparent)
    listener -> {"runs": true}, every few seconds while the call runs
    listener -> (result, None) or (None, error)

Calls and results are pickled bodies of ``core.wire``.  Always true: both sides check that the other
has the run's key before anything is unpickled; only commands of ``RolloutServer`` can be called; a
caller waits as long as the listener lives, and no longer; a call that was received runs to its end,
also if its caller has ended.
"""

from __future__ import annotations

import inspect
import pickle
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from engines.http.trace_context import current_traceparent, in_trace
from engines.process.background import in_own_thread
from engines.protocol.plain_text import describe
from rollout.control.server.server import RolloutServer
from rollout.core import wire
from rollout.core.errors import ActorLost, ConfigError
from rollout.core.pending import LoopThread, Pending
from rollout.runtime.calls.caller import LAUNCH_NODE, node_without_ray
from rollout.weights.push.weight_push import WeightPush

P = ParamSpec("P")
T = TypeVar("T")

_HANDSHAKE_S = 10.0
_SIGN_OF_LIFE_S = 5.0
_SILENCE_S = 60.0
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
        key = secrets.token_hex(32)
        self._listener = wire.Listener(
            self._answer, key, name="control-call", host=host, timeout_s=_SILENCE_S
        )
        self.address = ControlAddress(host, self._listener.address[1], key)

    def close(self) -> None:
        """Accept no more calls; those that run end with their commands."""
        self._listener.stop_accepting()

    def _answer(self, connection: wire.Connection) -> None:
        _, num_bytes = connection.receive()
        call = connection.body(num_bytes)
        try:
            pending = self._call(*pickle.loads(call))
            while (ended := _ended_within(pending, _SIGN_OF_LIFE_S)) is None:
                connection.send({"runs": True})
            connection.send({}, pickle.dumps(ended))
        except OSError:
            raise  # the caller has ended
        except Exception as error:  # the request or the result cannot be pickled
            refusal = ConfigError(f"this call is not possible: {describe(error)}")
            connection.send({}, pickle.dumps((None, refusal)))

    def _call(
        self, server: str, method: str, args: Any, kwargs: Any, traceparent: str = ""
    ) -> Pending[Any]:
        if not server:
            names: Future[list[str]] = Future()
            names.set_result(list(self._servers))
            return Pending(names)
        command = getattr(RolloutServer, method, None)
        if method.startswith("_") or method in _NOT_FOR_CALLERS:
            command = None
        if not inspect.iscoroutinefunction(command):
            raise ConfigError(f"{method!r} is not a command of a server")
        call = command(self._servers[server], *args, **kwargs)
        return self._loop.submit(in_trace(traceparent, call))


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
        request = (self._server, method, args, dict(kwargs), current_traceparent())
        request_of = partial(self._ended, request)
        return Pending(in_own_thread(request_of, f"call-{method}"))

    def _ended(self, request: tuple[Any, ...]) -> Any:
        """The result of a call, or its error."""
        address = self._address
        try:
            result, error = self._exchange(pickle.dumps(request))
        except wire.Refused as refusal:
            raise ConfigError(
                f"{address.host}:{address.port} refused the key, or this process: {refusal}"
            ) from None
        except OSError as failed:
            raise ActorLost(
                f"server {self._server or 'of the run'}: the process that launched it, at "
                f"{address.host}:{address.port}, does not answer: {describe(failed)}",
                actor=self._server,
            ) from None
        if error is not None:
            raise error
        return result

    def _exchange(self, request: bytes) -> tuple[Any, BaseException | None]:
        where = (self._address.host, self._address.port)
        connection = wire.connect(
            where, self._address.key, connect_s=_HANDSHAKE_S, timeout_s=_HANDSHAKE_S
        )
        with closing(connection):
            connection.timeout_s = _SILENCE_S
            connection.send({}, request)
            while True:
                head, num_bytes = connection.receive()
                if not head.get("runs"):
                    ended: tuple[Any, BaseException | None]
                    ended = pickle.loads(connection.body(num_bytes))
                    return ended

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


def _ended_within(pending: Pending[Any], seconds: float) -> tuple[Any, BaseException | None] | None:
    """Result and error of a call, or None while it runs."""
    try:
        return pending.result(seconds), None
    except Exception as error:
        if pending.done() and seconds:
            return _ended_within(pending, 0.0)  # it may have ended just behind the wait
        return (None, error) if pending.done() else None
