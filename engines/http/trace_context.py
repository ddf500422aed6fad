"""The trace of a caller, from its span to the spans of what it calls (W3C Trace Context).

    trainer, in a span        -> server             -> groups       traceparent, a plain text
    trainer, in a span        -> router, unread     -> engines      headers of a request
    agent                     -> worker of agents   -> router       the same

Always true: a process that has not imported OpenTelemetry pays one look-up for a call or request,
and sends nothing of this.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Mapping
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_CALLER: ContextVar[str] = ContextVar("CALLER", default="")
_REQUEST: ContextVar[Mapping[str, str] | None] = ContextVar("REQUEST", default=None)
_NAMES = ("traceparent", "tracestate")


def trace_headers() -> dict[str, str]:
    """The headers of a request: by the caller's active span as ``OTEL_PROPAGATORS`` says, or those
    that are passed on; none outside of a trace."""
    headers = dict(_REQUEST.get() or {})
    if _is_in_span():
        from opentelemetry import propagate

        propagate.inject(headers)
    return headers


def pass_on(headers: Mapping[str, str]) -> None:
    """Let what this task requests have the trace of the request with these headers, which it
    answers."""
    _REQUEST.set({name: headers[name] for name in _NAMES if name in headers})


def current_traceparent() -> str:
    """The active span as a ``traceparent``; without one, that of the call which this task does."""
    if not _is_in_span():
        return _CALLER.get()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier["traceparent"]


def traceparent_of_call() -> str:
    """The ``traceparent`` of the call which this task does; empty outside of a trace."""
    return _CALLER.get()


def in_trace(traceparent: str, call: Awaitable[T]) -> Awaitable[T]:
    """The same call, whose spans belong to this trace."""
    return _in_trace(traceparent, call) if traceparent else call


def in_callers_trace(call: Awaitable[T]) -> Awaitable[T]:
    """The same call, whose spans belong to the trace in which this function is called."""
    return in_trace(current_traceparent(), call)


async def _in_trace(traceparent: str, call: Awaitable[T]) -> T:
    token = _CALLER.set(traceparent)
    try:
        return await call
    finally:
        _CALLER.reset(token)


def _is_in_span() -> bool:
    if "opentelemetry.trace" not in sys.modules:
        return False
    from opentelemetry import trace

    return trace.get_current_span().get_span_context().is_valid
