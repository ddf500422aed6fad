"""Who watches the calls to engines, if anybody does.

Always true: a call behaves the same whether it is watched or not, and the watcher of a task is
inherited by the tasks it starts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Protocol


class WatchedCall(Protocol):
    """One call while it runs.

    Attributes:
        num_bytes: what its request's body has.
    """

    num_bytes: int


class Watcher(Protocol):
    """Told of every HTTP call to an engine, from its first byte to its answer or its error."""

    def watch_call(
        self, engine: str, operation: str, budget_s: float
    ) -> AbstractContextManager[WatchedCall]: ...


WATCHER: ContextVar[Watcher | None] = ContextVar("WATCHER", default=None)


class _Unwatched:
    num_bytes = 0


def watched(engine: str, operation: str, budget_s: float) -> AbstractContextManager[WatchedCall]:
    """A call, told to the watcher of this task."""
    watcher = WATCHER.get()
    if watcher is None:
        return nullcontext(_Unwatched())
    return watcher.watch_call(engine, operation, budget_s)
