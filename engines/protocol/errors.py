"""Errors of a call to an engine.

    EngineError
      EngineUnreachable   no connection, or it broke before a whole answer arrived
      EngineRejected      the engine replied with an error
      EngineNotReady      the process died or never became ready while starting
      EngineHung          no reply within the deadline
      PortTaken           the port it should listen on is in use

    NotEncodable          JSON cannot express what should be sent; no engine is to blame

An ``EngineError`` knows one engine and one call.  What a failure means for a group is decided in
``rollout``.  Every error survives pickling: the message is the only positional argument and
every other field is a keyword with a default.
"""

from __future__ import annotations

from typing import TypedDict, Unpack


class FailedCall(TypedDict, total=False):
    """Which call failed: the attributes that every ``EngineError`` has."""

    engine: str
    operation: str


class EngineError(Exception):
    """Base of all errors an engine call can raise.

    Attributes:
        engine: the engine that was called: its id, or its URL where no id is known.
        operation: the call, for example ``release_memory_occupation``.
    """

    def __init__(self, message: str, *, engine: str = "", operation: str = "") -> None:
        super().__init__(message)
        self.engine = engine
        self.operation = operation


class EngineUnreachable(EngineError):
    """The connection was refused, reset or closed before the whole answer arrived.

    Attributes:
        maybe_executed: the request may have reached the engine, so it must not be repeated
            blindly.  False only where the connection was never made.
    """

    def __init__(
        self, message: str, *, maybe_executed: bool = True, **call: Unpack[FailedCall]
    ) -> None:
        super().__init__(message, **call)
        self.maybe_executed = maybe_executed


class EngineRejected(EngineError):
    """The engine answered with an error status.

    Attributes:
        status: the HTTP status code.
        body: the body of the answer, cut to a length fit for a log line.
    """

    def __init__(
        self, message: str, *, status: int = 0, body: str = "", **call: Unpack[FailedCall]
    ) -> None:
        super().__init__(message, **call)
        self.status = status
        self.body = body


class EngineNotReady(EngineError):
    """The engine's process ended, or did not become ready, before its deadline.

    Attributes:
        log_tail: the last lines of the process's log.
        exit_status: its exit status, or None while it still ran.
    """

    def __init__(
        self,
        message: str,
        *,
        engine: str = "",
        operation: str = "start",
        log_tail: str = "",
        exit_status: int | None = None,
    ) -> None:
        super().__init__(message, engine=engine, operation=operation)
        self.log_tail = log_tail
        self.exit_status = exit_status


class EngineHung(EngineError, TimeoutError):
    """No answer within the deadline; whether the call took effect is unknown.

    Attributes:
        budget_s: the deadline in seconds.
    """

    def __init__(self, message: str, *, budget_s: float = 0.0, **call: Unpack[FailedCall]) -> None:
        super().__init__(message, **call)
        self.budget_s = budget_s


class PortTaken(EngineError):
    """The port an engine should listen on is in use.

    Attributes:
        port: number of that port; 0 where a whole range is taken.
    """

    def __init__(
        self, message: str, *, engine: str = "", operation: str = "start", port: int = 0
    ) -> None:
        super().__init__(message, engine=engine, operation=operation)
        self.port = port


class NotEncodable(ValueError):
    """JSON cannot express what should be sent: an error of the caller.  Nothing was sent."""
