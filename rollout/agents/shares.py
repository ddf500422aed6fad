"""Threads that share the interpreter's lock fairly between clients, and end with them.

Templates, tokenizers and parsers hold the lock for as long as their input is.  Always true: at most
``num_at_once`` of them run, those of the clients that have had the least so far; one that runs
gives way at its next call of its share.  Work whose client has left, or that has taken too long,
ends there.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MOST_THREADS = 32
_SLICE_S = 0.005
_NICENESS = 5
_LONG_BYTES = 1 << 20
_MOST_LONG = 8
"""Threads that work on inputs of more than this; the others are for shorter ones."""
_LONG_TEXT = 1 << 18
"""Characters of a text whose tokens take so long that one such text is encoded at a time."""


class WorkEnded(Exception):
    """The work was given up: its client has left, or it has taken too long."""


class Share:
    """The share of one piece of work, which runs in a thread.

    Args:
        deadline_s: on the clock of ``time.monotonic``.
    """

    def __init__(self, shares: Shares, client: str, deadline_s: float) -> None:
        self.client = client
        self.has_left = False
        self._shares = shares
        self._deadline_s = deadline_s
        self._began_s = 0.0
        self._is_in = False

    def __call__(self) -> None:
        """Give way to other clients that have had less, as is due.

        Raises:
            WorkEnded: the client has left, or the work has taken too long.
        """
        self._end_if_over()
        if time.thread_time() - self._began_s > _SLICE_S and self._shares.is_due(self):
            self._leave()
            self._enter()

    @contextmanager
    def aside(self, num_characters: int) -> Iterator[None]:
        """Around work on a text that does not hold the interpreter's lock."""
        self()
        if num_characters < _LONG_TEXT:
            yield
            return
        self._leave()
        try:
            with self._shares.long_text:
                self._end_if_over()
                yield
        finally:
            self._enter(is_ending=True)

    def run(self, work: Callable[[*Ts, Share], T], *arguments: *Ts) -> T:
        """The work, in this thread."""
        self._enter()
        try:
            return work(*arguments, self)
        finally:
            self._leave()

    def _end_if_over(self) -> None:
        if self.has_left:
            raise WorkEnded("the client has left")
        if time.monotonic() > self._deadline_s:
            raise WorkEnded("this chat took too long to read; send a shorter one")

    def _enter(self, *, is_ending: bool = False) -> None:
        self._shares.enter(self, is_ending=is_ending)
        self._is_in = True
        self._began_s = time.thread_time()

    def _leave(self) -> None:
        if self._is_in:
            self._is_in = False
            self._shares.leave(self, time.thread_time() - self._began_s)


class Shares:
    """The threads of one worker.

    Args:
        within_s: limit of one piece of work.
    """

    def __init__(self, num_at_once: int = 2, within_s: float = 300.0) -> None:
        self._within_s = within_s
        self._pool = ThreadPoolExecutor(_MOST_THREADS, "chat-work", initializer=_be_nice)
        self._changed = threading.Condition()
        self._num_free = num_at_once
        self._waiting: list[Share] = []
        self._had_s: dict[str, float] = {}
        self._num_of: dict[str, int] = {}
        self._long = asyncio.Semaphore(_MOST_LONG)
        self.long_text = threading.Lock()

    def close(self) -> None:
        with self._changed:
            for share in self._waiting:
                share.has_left = True
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(
        self, client: str, num_bytes: int, work: Callable[[*Ts, Share], T], *arguments: *Ts
    ) -> T:
        """What the work returns, which gets these arguments and its share.

        Args:
            client: for whom it is done.
            num_bytes: of its input.

        Raises:
            WorkEnded: it has taken too long.
        """
        if num_bytes < _LONG_BYTES:
            return await self._run(client, work, *arguments)
        async with self._long:
            return await self._run(client, work, *arguments)

    async def _run(self, client: str, work: Callable[[*Ts, Share], T], *arguments: *Ts) -> T:
        share = Share(self, client, time.monotonic() + self._within_s)
        self._num_of[client] = self._num_of.get(client, 0) + 1
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._pool, share.run, work, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            share.has_left = True
            running.add_done_callback(_passed_over)
            with self._changed:
                self._changed.notify_all()
            raise
        finally:
            self._num_of[client] -= 1
            if not self._num_of[client]:
                del self._num_of[client]
                self._had_s.pop(client, None)

    def is_due(self, share: Share) -> bool:
        """Whether a client that waits has had less."""
        with self._changed:
            had_s = self._had_s.get(share.client, 0.0) + _SLICE_S
            return any(self._had_s.get(one.client, 0.0) < had_s for one in self._waiting)

    def enter(self, share: Share, *, is_ending: bool = False) -> None:
        """Wait until this share's turn has come.

        Args:
            is_ending: without a wait for the turn of one that has to end.

        Raises:
            WorkEnded: the client has left meanwhile.
        """
        with self._changed:
            self._waiting.append(share)
            try:
                while not self._is_next(share):
                    self._changed.wait()
                    if share.has_left and not is_ending:
                        raise WorkEnded("the client has left")
            finally:
                self._waiting.remove(share)
                self._changed.notify_all()
            self._num_free -= 1

    def leave(self, share: Share, had_s: float) -> None:
        """Let others run; this one has had ``had_s`` of a processor."""
        with self._changed:
            if share.client in self._num_of:
                self._had_s[share.client] = self._had_s.get(share.client, 0.0) + had_s
            self._num_free += 1
            self._changed.notify_all()

    def _is_next(self, share: Share) -> bool:
        least = min(self._waiting, key=lambda one: self._had_s.get(one.client, 0.0))
        return self._num_free > 0 and least is share


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _passed_over(running: asyncio.Future[Any]) -> None:
    """No client waits for it any more."""
    if not running.cancelled():
        running.exception()
