"""The trainer's end of a feed: makes buckets in a thread, hands them out in others.

See ``feed.py`` for what is said and for what is always true.  Threads, not an event loop: making
a bucket is torch's work and blocks, and the trainer has no loop.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any

from rollout.fanout import describe
from rollout.weights.feed import MAX_LINE_BYTES, FeedAddress
from rollout.weights.joining import Joiner, from_json
from rollout.weights.transports.carrier import Payload

logger = logging.getLogger(__name__)
# A bucket may be made while the one before it is being applied.
AHEAD = 1


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket as the trainer made it.

    Attributes:
        then: what the trainer still does once every reader has it: its part of a broadcast.
    """

    payload: Payload
    is_last: bool
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    then: Callable[[], None] | None = None


Terms = Callable[[Sequence[Joiner]], Mapping[str, Any]]
"""Told which engines there are, says what the readers must know."""


def _no_terms(joiners: Sequence[Joiner]) -> Mapping[str, Any]:
    return {}


class _Ended(Exception):
    """The push is over, one way or the other."""


class Feed:
    """Hands out the buckets of one push.

    Args:
        buckets: iterated in a thread of this feed, one step per bucket.
        timeout_s: how long any of the two sides waits for the other.
        gather_s: how long after the first reader the last may come.
        terms: see ``Terms``.
        when_ended: called in the making thread at the end, whatever it was, with whether every
            reader has taken all and keeps the group it joined.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        *,
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
        gather_s: float = 30.0,
        terms: Terms = _no_terms,
        when_ended: Callable[[bool], None] = lambda is_kept: None,
    ) -> None:
        self._buckets = buckets
        self._timeout_s = timeout_s
        self._gather_s = min(gather_s, timeout_s)
        self._terms_of = terms
        self._when_ended = when_ended
        self._changed = threading.Condition()
        self._made: dict[int, Bucket] = {}
        self._wanted: dict[str, int] = {}
        self._given: dict[str, int] = {}
        self._joiners: dict[str, tuple[Joiner, ...]] = {}
        self._keeping: set[str] = set()
        self._num_readers = 0
        self._terms: dict[str, Mapping[str, Any]] = {}
        self._error = ""
        self._is_over = False
        self._listener = socket.create_server((host, 0))
        self.address = FeedAddress(
            host, self._listener.getsockname()[1], secrets.token_hex(16), timeout_s
        )
        self._sockets: set[socket.socket] = set()
        self._threads = [
            threading.Thread(target=self._accept, name="feed-accept", daemon=True),
            threading.Thread(target=self._make, name="feed-make", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End it; whoever still waits is told.  Returns when its threads have ended."""
        self._end("the push was ended by the trainer")
        # shutdown, not close: a thread that is blocked in accept does not see a close.
        for one in (self._listener, *list(self._sockets)):
            with suppress(OSError):  # nobody was connected
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._timeout_s)
        self._listener.close()

    # -- making -----------------------------------------------------------------------------

    def _make(self) -> None:
        try:
            self._gather_readers()
            self._hand_out()
        except _Ended:
            pass
        except Exception as error:  # it is told to those who wait for the bucket
            logger.error("push: a bucket could not be made: %s", describe(error))
            self._end(f"the trainer could not make a bucket: {describe(error)}")
        finally:
            close = getattr(self._buckets, "close", None)
            if close is not None:  # a generator gives back what its buckets stand in
                close()
            self._when_ended(len(self._keeping) == self._num_readers > 0)

    def _gather_readers(self) -> None:
        """All of them are there, and know the terms; or none is given anything."""
        with self._changed:
            self._wait(lambda: bool(self._joiners), None)
            if not self._wait(lambda: len(self._joiners) == self._num_readers, self._gather_s):
                there = ", ".join(sorted(self._joiners))
                self._error = (
                    f"{len(self._joiners)} of {self._num_readers} groups came for the push within "
                    f"{self._gather_s:g} s ({there}); no engine was asked for anything"
                )
                self._changed.notify_all()
                raise _Ended
        joiners = dict(self._joiners)
        terms = self._terms_of([one for of in joiners.values() for one in of])
        first = 1  # the trainer is rank 0
        with self._changed:
            for reader in sorted(joiners):
                self._terms[reader] = {**terms, "rank_offset": first}
                first += sum(one.num_ranks for one in joiners[reader])
            self._changed.notify_all()

    def _hand_out(self) -> None:
        source = iter(self._buckets)
        index = 0
        while True:
            # What comes next may stand in the memory of the last but one.
            self._wait_for_all(index - AHEAD)
            bucket = next(source, None)
            if bucket is None:
                break
            then, is_last = bucket.then, bucket.is_last
            with self._changed:
                self._made.pop(index - AHEAD - 1, None)
                # Without what it would do: that holds the bucket's tensors.
                self._made[index] = replace(bucket, then=None)
                self._changed.notify_all()
            del bucket
            if then is not None:
                self._wait_for_all_to_have(index)
                then()
                del then
            index += 1
            if is_last:
                break
        self._wait_for_all(index)

    def _wait_for_all(self, index: int) -> None:
        """Until every reader has applied all buckets before ``index``."""
        if index > 0:
            with self._changed:
                self._demand(lambda: self._least(self._wanted) >= index, "applied a bucket")

    def _wait_for_all_to_have(self, index: int) -> None:
        with self._changed:
            self._demand(lambda: self._least(self._given) >= index, "took a bucket")

    def _least(self, of: Mapping[str, int]) -> int:
        # A reader that has gone needs nothing more; the others go on.
        return min((of[reader] for reader in self._joiners), default=1 << 60)

    def _demand(self, holds: Callable[[], bool], what: str) -> None:
        if not self._wait(holds, self._timeout_s):
            late = f"no reader {what} within {self._timeout_s:g} s"
            self._error = late
            self._changed.notify_all()
            raise _Ended
        if not self._joiners:
            raise _Ended

    def _wait(self, holds: Callable[[], bool], budget_s: float | None) -> bool:
        deadline = None if budget_s is None else time.monotonic() + budget_s
        while not holds():
            if self._is_over or self._error:
                raise _Ended
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._changed.wait(left)
        return True

    def _end(self, why: str) -> None:
        with self._changed:
            self._is_over = True
            self._error = self._error or why
            self._changed.notify_all()

    # -- handing out ------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_over:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(self._timeout_s)
            self._sockets.add(connection)
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="feed-serve", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        reader = ""
        try:
            with connection, connection.makefile("rb") as stream:
                # Between two questions its engines are at work, which has deadlines of its own.
                hello = _read(stream)
                connection.settimeout(None)
                if not secrets.compare_digest(str(hello.get("token")), self.address.token):
                    return
                reader = str(hello["reader"])
                _say(connection, self._welcome(reader, hello), None)
                while True:
                    self._answer(connection, reader, _read(stream))
        except (OSError, ValueError, TypeError, KeyError, _Ended):
            pass
        finally:
            self._sockets.discard(connection)
            with self._changed:
                self._joiners.pop(reader, None)
                self._changed.notify_all()

    def _welcome(self, reader: str, hello: Mapping[str, Any]) -> dict[str, Any]:
        with self._changed:
            self._num_readers = int(hello["num_readers"])
            self._wanted[reader], self._given[reader] = 0, -1
            self._joiners[reader] = from_json(hello["joiners"])
            self._changed.notify_all()
            while reader not in self._terms and not self._error:
                self._changed.wait()
            return {"error": self._error} if self._error else {"terms": self._terms[reader]}

    def _answer(self, connection: socket.socket, reader: str, asked: Mapping[str, Any]) -> None:
        index = int(asked["next"])
        with self._changed:
            if asked.get("keeps"):
                self._keeping.add(reader)
            self._wanted[reader] = index
            self._changed.notify_all()
            if index and index - 1 in self._made and self._made[index - 1].is_last:
                _say(connection, {"is_last": True, "fingerprints": {}, "payload": {}}, None)
                return
            while index not in self._made and not self._error:
                self._changed.wait()
            bucket = self._made.get(index)
            if bucket is None:
                _say(connection, {"error": self._error}, None)
                return
        words = {"is_last": bucket.is_last, "fingerprints": dict(bucket.fingerprints)}
        if isinstance(bucket.payload, bytes):
            _say(connection, words | {"num_bytes": len(bucket.payload)}, bucket.payload)
        else:
            _say(connection, words | {"payload": dict(bucket.payload)}, None)
        with self._changed:
            self._given[reader] = index
            self._changed.notify_all()


def _say(connection: socket.socket, words: Mapping[str, Any], body: bytes | None) -> None:
    connection.sendall(json.dumps(words).encode() + b"\n")
    if body is not None:
        connection.sendall(body)


def _read(stream: IO[bytes]) -> dict[str, Any]:
    line = stream.readline(MAX_LINE_BYTES)
    if not line:
        raise OSError("the reader has gone")
    words = json.loads(line)
    if not isinstance(words, dict):
        raise ValueError("no JSON object")
    return words
