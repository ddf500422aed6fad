"""The requests of one connection take turns; these are the turns that reach no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from rollout.router import answers

if TYPE_CHECKING:
    from rollout.router.protocol import RouterProtocol


class Turn(Protocol):
    """One request of a connection."""

    is_last: bool

    def start(self) -> None: ...
    def feed(self, data: bytes) -> None: ...
    def end_of_request(self) -> None: ...
    def client_left(self) -> None: ...
    def write_paused(self) -> None: ...
    def write_resumed(self) -> None: ...


class AppTurn:
    """A request for the control application."""

    def __init__(self, protocol: RouterProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    @property
    def is_last(self) -> bool:
        return not self._cycle.keep_alive

    @is_last.setter
    def is_last(self, value: bool) -> None:
        self._cycle.keep_alive = not value

    def start(self) -> None:
        self._protocol._start_asgi_task(self._cycle, self._protocol.app)

    def feed(self, data: bytes) -> None:
        cycle = self._cycle
        if cycle.response_complete:
            return
        cycle.body += data
        if len(cycle.body) > 1 << 16:
            self._protocol.flow.pause_reading()
        cycle.message_event.set()

    def end_of_request(self) -> None:
        self._cycle.more_body = False
        self._cycle.message_event.set()

    def client_left(self) -> None:
        if not self._cycle.response_complete:
            self._cycle.disconnected = True
        self._cycle.message_event.set()

    def write_paused(self) -> None:
        """The application waits by itself."""

    def write_resumed(self) -> None:
        """And goes on by itself."""


class BadRequest:
    """What could not be parsed, answered in its turn."""

    def __init__(self, protocol: RouterProtocol, answer: answers.Answer) -> None:
        self._protocol = protocol
        self._answer = answer
        self.is_last = True

    def start(self) -> None:
        self._protocol.write(self._answer.to_bytes(is_last=True))
        self._protocol.finish_unread()

    def feed(self, data: bytes) -> None: ...
    def end_of_request(self) -> None: ...
    def client_left(self) -> None: ...
    def write_paused(self) -> None: ...
    def write_resumed(self) -> None: ...
