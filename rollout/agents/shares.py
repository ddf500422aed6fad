"""Threads that share the interpreter's lock fairly between clients, and end with them.

Templates, tokenizers and parsers hold the lock for as long as their input is.  Always true: at most
``num_at_once`` works are in, and each that runs is in one line.  The next one in is of the client
that has had least, and now and then the one that waits longest, so that none waits for ever.  One
that is in gives way at its next call of its share; one whose client has left, or that has taken
too long, ends there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MOST_THREADS = 32
_MOST_OF_CLIENT = 4
_LONG_BYTES = 1 << 20
_MOST_LONG = 8
"""Works on inputs of more than this that have begun; the other threads are for shorter ones."""
_SLICE_S = 0.005
_LONG_TEXT = 1 << 18
"""Characters of a text whose tokens take so long that one such text is encoded at a time."""
_LONGEST_WAITING_EVERY = 4


class WorkEnded(BaseException):
    """The work was given up: its client has left, or it has taken too long.

    No ``Exception``, as ``CancelledError`` is none: nothing that a template raises is like it.
    """


@dataclass(eq=False, slots=True)
class _Client:
    """A client with works.

    Attributes:
        num: of its works.
        had_s: of a processor, for these and for those beside which they began.
    """

    num: int = 0
    had_s: float = 0.0
    threads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_OF_CLIENT))


@dataclass(eq=False, slots=True)
class _Line:
    """Works that want to be in; used with the lock of its ``Shares``."""

    num_free: int
    num_entered: int = 0
    waiting: list[Share] = field(default_factory=list)  # since when they wait

    def may_enter(self, share: Share) -> bool:
        if not self.num_free:
            return False
        if self.num_entered % _LONGEST_WAITING_EVERY == _LONGEST_WAITING_EVERY - 1:
            return self.waiting[0] is share
        return min(self.waiting, key=lambda waiting: waiting.client.had_s) is share


class Share:
    """The share of one piece of work, which runs in a thread."""

    def __init__(self, shares: Shares, client: _Client) -> None:
        self.client = client
        self.has_left = False
        self._shares = shares
        self._line: _Line | None = None
        self._began_s = 0.0
        self._due_s = 0.0  # a thread's own time takes longer to read

    def __call__(self) -> None:
        """Give way to other clients that have had less, as is due.

        Raises:
            WorkEnded: the client has left, or the work has taken too long.
        """
        self.end_if_left()
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _SLICE_S
        if self._shares.is_due(self, time.thread_time() - self._began_s):
            self._leave()
            self._enter(self._shares.running)

    @contextmanager
    def aside(self, num_characters: int) -> Iterator[None]:
        """Around work on a text that does not hold the interpreter's lock.

        Raises:
            WorkEnded: as a call does.
        """
        self()
        if num_characters < _LONG_TEXT:
            yield
            return
        self._leave()
        self._enter(self._shares.long_texts)
        try:
            yield
        finally:
            self._leave()
            self._enter(self._shares.running)

    def run(self, work: Callable[[*Ts, Share], T], *arguments: *Ts) -> T:
        """The work, in this thread."""
        try:
            self._enter(self._shares.running)
            return work(*arguments, self)
        finally:
            self._leave()

    def end_if_left(self) -> None:
        if self.has_left:
            raise WorkEnded("the client has left")

    def _enter(self, line: _Line) -> None:
        self._shares.enter(line, self)
        self._line, self._began_s = line, time.thread_time()
        self._due_s = time.monotonic() + _SLICE_S

    def _leave(self) -> None:
        if self._line is not None:
            self._shares.leave(self._line, self, time.thread_time() - self._began_s)
            self._line = None


class Shares:
    """The threads of one worker.

    Args:
        within_s: limit of one piece of work, with its wait for a thread.
    """

    def __init__(self, num_at_once: int = 2, within_s: float = 300.0) -> None:
        self.running = _Line(num_at_once)
        self.long_texts = _Line(1)
        self._within_s = within_s
        self._changed = threading.Condition()
        self._clients: dict[str, _Client] = {}
        self._pool = ThreadPoolExecutor(_MOST_THREADS, "chat-work")
        self._threads = asyncio.Semaphore(_MOST_THREADS)
        self._long = asyncio.Semaphore(_MOST_LONG)
        self._shares: set[Share] = set()

    def close(self) -> None:
        """All work ends at its next check."""
        self._end(*self._shares)
        self._pool.shutdown(wait=False)

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
        its = self._clients.setdefault(client, _Client())
        its.num += 1
        long = self._long if num_bytes >= _LONG_BYTES else nullcontext()
        try:
            async with asyncio.timeout(self._within_s) as limit, its.threads, long, self._threads:
                return await self._in_thread(its, lambda share: work(*arguments, share))
        except TimeoutError:
            if not limit.expired():
                raise
            raise WorkEnded("this chat took too long to read; send a shorter one") from None
        finally:
            its.num -= 1
            if not its.num:
                del self._clients[client]

    async def _in_thread(self, client: _Client, work: Callable[[Share], T]) -> T:
        share = Share(self, client)
        self._shares.add(share)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, share.run, work)
        except asyncio.CancelledError:
            self._end(share)
            raise
        finally:
            self._shares.remove(share)

    def _end(self, *shares: Share) -> None:
        with self._changed:
            for share in shares:
                share.has_left = True
            self._changed.notify_all()

    def is_due(self, share: Share, used_s: float) -> bool:
        """Whether a client waits that has had less, ``used_s`` of this one included."""
        had_s = share.client.had_s + used_s
        with self._changed:
            return any(share.client.had_s < had_s for share in self.running.waiting)

    def enter(self, line: _Line, share: Share) -> None:
        """Wait until the share's turn in this line has come.

        Raises:
            WorkEnded: the client has left meanwhile.
        """
        with self._changed:
            line.waiting.append(share)
            try:
                while not line.may_enter(share):
                    share.end_if_left()
                    self._changed.wait()
                share.end_if_left()
                line.num_free -= 1
                line.num_entered += 1
            finally:
                line.waiting.remove(share)
                self._changed.notify_all()

    def leave(self, line: _Line, share: Share, used_s: float) -> None:
        """Let others in; this one has used so much of a processor."""
        with self._changed:
            share.client.had_s += used_s
            line.num_free += 1
            self._changed.notify_all()
