"""The trainer's side of a stream: makes buckets in one thread, sends them in others.

``stream_reader`` describes the messages and what is always true.  It uses threads, not an event
loop: making a bucket blocks in torch, and the trainer has no event loop.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engines.process.background import Then, keep_thread
from engines.protocol.plain_text import describe
from rollout.core import wire
from rollout.weights.push.stream_reader import PushStreamAddress, split_payload
from rollout.weights.routes.route import BUCKETS_AHEAD, BroadcastMember, StreamedBucket, from_json

logger = logging.getLogger(__name__)


MakeTerms = Callable[[Sequence[BroadcastMember]], Mapping[str, Any]]
"""From the engines of the push to the terms that readers get."""


class _StreamEnded(Exception):
    """The push has ended, successfully or not."""


@dataclass(slots=True)
class _Reader:
    """One reader.

    Attributes:
        wanted: the bucket that it waits for; it has applied those before.
        given: the last bucket that it has.
        is_connected: a disconnected one does not count, and the others continue.
        keeps: it keeps its group, after all buckets.
    """

    members: tuple[BroadcastMember, ...]
    wanted: int = 0
    given: int = -1
    terms: Mapping[str, Any] | None = None
    is_connected: bool = True
    keeps: bool = False


class PushStreamServer:
    """Sends the buckets of one push to its readers.

    Args:
        buckets: iterated in a thread of this server, one step per bucket.
        timeout_s: for each side, to wait for the other.
        gather_s: from the first reader's connection to the last one's.
        terms: see ``MakeTerms``.
        when_ended: called in the thread that makes buckets, also after a failure; its argument is
            whether every reader got all buckets and keeps its group.
    """

    def __init__(
        self,
        buckets: Iterable[StreamedBucket],
        *,
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
        gather_s: float = 30.0,
        terms: MakeTerms = lambda members: {},
        when_ended: Callable[[bool], None] = lambda is_reusable: None,
    ) -> None:
        self._buckets = buckets
        self._gather_s = min(gather_s, timeout_s)
        self._terms_of = terms
        self._when_ended = when_ended
        self._changed = threading.Condition()
        self._made: dict[int, StreamedBucket] = {}
        self._readers: dict[str, _Reader] = {}
        self._num_readers = 0
        self._error = ""
        token = secrets.token_hex(16)
        self._listener = wire.Listener(
            self._serve, token, name="push-stream", host=host, timeout_s=timeout_s
        )
        self.address = PushStreamAddress(host, self._listener.address[1], token, timeout_s)
        try:
            self._make_thread = keep_thread(self._make, "push-stream-make", Then.IS_OVER)
        except BaseException:
            self._listener.close()
            raise

    def close(self) -> None:
        """End the push; waiting readers get an error. Returns when the threads have ended."""
        self._end("the push was ended by the trainer")
        self._listener.close(self.address.timeout_s)
        if self._make_thread is not threading.current_thread():
            self._make_thread.join(self.address.timeout_s)

    # -- making -----------------------------------------------------------------------------

    def _make(self) -> None:
        try:
            self._gather_readers()
            self._send_all()
        except _StreamEnded:
            pass
        except BaseException as error:  # a SystemExit, too: readers that wait for the bucket get it
            logger.error("push: a bucket could not be made: %s", describe(error))
            self._end(f"the trainer could not make a bucket: {describe(error)}")
        finally:
            # A reader that has them all asks for none, and no other one waits in vain.
            self._end("the trainer's buckets ended without a last one")
            close = getattr(self._buckets, "close", None)
            if close is not None:  # a generator releases the buffers of its buckets
                close()
            keeping = [reader for reader in self._readers.values() if reader.keeps]
            self._when_ended(len(keeping) == self._num_readers > 0)

    def _gather_readers(self) -> None:
        """Wait for all readers, and send them the terms; or none gets a bucket."""
        with self._changed:
            self._wait(lambda: bool(self._connected()), None)
            if not self._wait(lambda: len(self._connected()) == self._num_readers, self._gather_s):
                names = sorted(
                    name for name, reader in self._readers.items() if reader.is_connected
                )
                self._error = (
                    f"{len(names)} of {self._num_readers} groups connected for the push "
                    f"within {self._gather_s:g} s ({', '.join(names)}); no engine was called"
                )
                self._changed.notify_all()
                raise _StreamEnded
        readers = [reader for _, reader in sorted(self._readers.items())]
        terms = self._terms_of([member for reader in readers for member in reader.members])
        first = 1  # the trainer is rank 0
        with self._changed:
            for reader in readers:
                reader.terms = {**terms, "rank_offset": first}
                first += sum(member.num_ranks for member in reader.members)
            self._changed.notify_all()

    def _connected(self) -> list[_Reader]:
        return [reader for reader in self._readers.values() if reader.is_connected]

    def _send_all(self) -> None:
        source = iter(self._buckets)
        index = 0
        while True:
            # The next bucket may reuse the memory of the last but one.
            if index > BUCKETS_AHEAD:
                self._wait_for_all("wanted", index - BUCKETS_AHEAD, "applied a bucket")
            bucket = next(source, None)
            if bucket is None:
                break
            then, is_last = bucket.then, bucket.is_last
            with self._changed:
                self._made.pop(index - BUCKETS_AHEAD - 1, None)
                # Without ``then``, which refers to the bucket's tensors.
                self._made[index] = replace(bucket, then=None)
                self._changed.notify_all()
            del bucket
            if then is not None:
                self._wait_for_all("given", index, "took a bucket")
                then()
                del then
            index += 1
            if is_last:
                break
        if index:
            self._wait_for_all("wanted", index, "applied a bucket")

    def _wait_for_all(self, progress: str, index: int, what: str) -> None:
        """Wait until every reader's ``progress`` is at ``index``."""
        with self._changed:
            if not self._wait(
                lambda: all(getattr(reader, progress) >= index for reader in self._connected()),
                self.address.timeout_s,
            ):
                self._error = f"no reader {what} within {self.address.timeout_s:g} s"
                self._changed.notify_all()
                raise _StreamEnded
            if not self._connected():
                raise _StreamEnded

    def _wait(self, holds: Callable[[], bool], budget_s: float | None) -> bool:
        deadline = None if budget_s is None else time.monotonic() + budget_s
        while not holds():
            if self._error:
                raise _StreamEnded
            remaining_s = None if deadline is None else deadline - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                return False
            self._changed.wait(remaining_s)
        return True

    def _end(self, why: str) -> None:
        with self._changed:
            self._error = self._error or why
            self._changed.notify_all()

    # -- sending ----------------------------------------------------------------------------

    def _serve(self, connection: wire.Connection) -> None:
        reader: _Reader | None = None
        try:
            reader = self._welcomed(connection.receive()[0])
            connection.send(self._terms_for(reader))
            while True:
                # Between two requests its engines load a bucket; that has its own deadlines.
                self._reply(connection, reader, connection.receive(may_idle=True)[0])
        finally:
            with self._changed:
                if reader is not None:
                    reader.is_connected = False
                self._changed.notify_all()

    def _welcomed(self, hello: Mapping[str, Any]) -> _Reader:
        with self._changed:
            self._num_readers = int(hello["num_readers"])
            reader = _Reader(from_json(hello["joiners"]))
            self._readers[str(hello["reader"])] = reader
            self._changed.notify_all()
            return reader

    def _terms_for(self, reader: _Reader) -> dict[str, Any]:
        with self._changed:
            while reader.terms is None and not self._error:
                self._changed.wait()
            return {"error": self._error} if self._error else {"terms": reader.terms}

    def _reply(
        self, connection: wire.Connection, reader: _Reader, request: Mapping[str, Any]
    ) -> None:
        index = int(request["next"])
        with self._changed:
            reader.keeps = reader.keeps or bool(request.get("keeps"))
            reader.wanted = index
            self._changed.notify_all()
            if index and index - 1 in self._made and self._made[index - 1].is_last:
                connection.send({"is_last": True, "fingerprints": {}, "payload": {}})
                return
            while index not in self._made and not self._error:
                self._changed.wait()
            bucket = self._made.get(index)
            if bucket is None:
                connection.send({"error": self._error})
                return
        fields = {"is_last": bucket.is_last, "fingerprints": dict(bucket.fingerprints)}
        where, body = split_payload(bucket.payload)
        connection.send(fields | where, body)
        with self._changed:
            reader.given = index
            self._changed.notify_all()
