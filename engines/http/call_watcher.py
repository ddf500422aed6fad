"""An optional watcher of the calls to engines.

Always true: a call behaves the same whether it is watched or not, and the watcher of a task is
inherited by the tasks it starts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Protocol


class Watcher(Protocol):
    """Sees each engine's part of a command, and every HTTP call until its reply or error."""

    def watch_engine(
        self, engine_id: str, operation: str, budget_s: float
    ) -> AbstractContextManager[object]: ...
    def watch_call(
        self, engine: str, operation: str, budget_s: float, num_bytes: int
    ) -> AbstractContextManager[object]:
        """``num_bytes`` is the size of the request's body."""
        ...


WATCHER: ContextVar[Watcher | None] = ContextVar("WATCHER", default=None)


def watch_engine(engine_id: str, operation: str, budget_s: float) -> AbstractContextManager[object]:
    """Report one engine's part of a command to the watcher of this task."""
    watcher = WATCHER.get()
    if watcher is None:
        return nullcontext()
    return watcher.watch_engine(engine_id, operation, budget_s)


def watch_call(
    engine: str, operation: str, budget_s: float, num_bytes: int
) -> AbstractContextManager[object]:
    """Report a call to the watcher of this task."""
    watcher = WATCHER.get()
    if watcher is None:
        return nullcontext()
    return watcher.watch_call(engine, operation, budget_s, num_bytes)
