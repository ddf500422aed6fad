"""The replies of one router in a file that outlives it, for the router in its place.

Always true: what is kept of a reply is what its engines have sent.  A router in the place of a lost
one takes it as the lost one did, for the same request alone: with its path, its id and its body.
One write is made for an event.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from engines.protocol.adapter_names import Names
from engines.protocol.logprob_kind import LogprobKind
from rollout.router.continuation.core import UNUSABLE
from rollout.router.continuation.reply import Reply
from rollout.router.state.state_file import Kind, Record, StateFile

_FOR_S = 600.0
_LEAST_ROOM = 4096
_EVENTS_IN_RECORD = 6
# Of events with all tokens so far, so many are enough.
_LEAST_EVENTS = 3

Key = tuple[str, str, bytes]
"""Path of a request, its id or its session's, and its body."""


class Attempt(NamedTuple):
    """One engine's part of a reply.

    Attributes:
        key: of the request; None but for the first part.
        version, dialect: of the engine.
        names: of the adapters' versions that answer, or of the base; see ``adapter_names``.
        logprob_kind: of the engine's log-probs.
    """

    key: Key | None
    version: int | None
    dialect: str
    names: Names
    logprob_kind: LogprobKind | None = None


@dataclass(slots=True)
class StoredReply:
    """The records of one reply.

    Attributes:
        names: see ``Attempt``.
        earlier: those that a lost router has written, in order.
    """

    key: Key
    names: Names
    _state: StateFile
    _owner: int
    earlier: list[Record] = field(default_factory=list)
    _number: int = 0
    _attempt: Attempt | None = None
    _places: list[int] = field(default_factory=list)
    _events: list[int] = field(default_factory=list)  # of the current engine
    _num_in_last: int = 0
    _used: int = 0  # bytes of the last one
    _room: int = 0

    @property
    def is_resumed(self) -> bool:
        """A lost router has begun it, so it stays with the weights that it had there."""
        return self._number > 0

    def begin(
        self,
        version: int | None,
        dialect: str,
        names: Names,
        logprob_kind: LogprobKind | None = None,
    ) -> None:
        """The request is sent to an engine; written with its first event."""
        self._places += self._events
        self._events, self._room = [], 0
        key = None if self._number else self.key
        self._attempt = Attempt(key, version, dialect, names, logprob_kind)

    def add(self, event: bytes, has_all: bool) -> None:
        """Keep one event of the engine.

        Args:
            event: one line, with its end.
            has_all: it has all tokens of its engine so far, as those before it.
        """
        begin, end = self._used, self._used + len(event)
        if end > self._room:
            self._begin_record(event)
        else:
            self._state.extend(self._events[-1], begin, event)
            self._used = end
            self._num_in_last += 1
            if has_all and self._num_in_last == _LEAST_EVENTS:
                while len(self._events) > 1:
                    self._state.remove(self._events.pop(0))

    def _begin_record(self, event: bytes) -> None:
        if self._attempt is not None:
            data = pickle.dumps(self._attempt, pickle.HIGHEST_PROTOCOL)
            self._attempt = None
            self._places.append(self._put(Kind.ATTEMPT, data))
        room = max(_LEAST_ROOM, _EVENTS_IN_RECORD * len(event))
        place = self._put(Kind.EVENTS, event, room)
        self._events.append(place)
        self._num_in_last, self._used = 1, len(event)
        self._room = room if place else 0

    def _put(self, kind: Kind, data: bytes, room: int = 0) -> int:
        self._number += 1
        return self._state.put(kind, self._owner, self._number, data, room)

    def end(self) -> None:
        """The reply has ended."""
        for place in (*self._places, *self._events):
            self._state.remove(place)
        self._places, self._events, self._room = [], [], 0

    def restore(self, reply: Reply) -> None:
        """Give a new reply what the engines of the lost router have sent."""
        found, self.earlier = self.earlier, []
        self._number = found[-1].number
        self._places = [record.place for record in found]
        events, before, has_gap = list[bytes](), 0, False
        with suppress(*UNUSABLE):  # what was read before it is kept
            for record in found:
                data = self._state.read(record.place)
                if record.kind is Kind.EVENTS:
                    has_gap |= record.number != before + 1
                    events += data.splitlines()
                else:
                    if before:
                        reply.restore(events, has_gap=has_gap)
                        reply.lose_engine()
                    attempt: Attempt = pickle.loads(data)
                    if attempt.logprob_kind is not None:
                        reply.follow_with(attempt.logprob_kind)
                    reply.body(attempt.version, attempt.dialect)
                    events, has_gap = [], False
                before = record.number
            reply.restore(events, has_gap=has_gap)
        reply.lose_engine()


class StoredReplies:
    """The replies of one router.

    Args:
        state: where they are kept.
    """

    def __init__(self, state: StateFile) -> None:
        self._state = state
        self._earlier: dict[tuple[Key, Names], list[StoredReply]] = {}
        self._until_s = 0.0

    def load(self, records: Iterable[Record], now_s: float) -> None:
        """Take over what a lost router has written, for requests that come in time."""
        by_owner: dict[int, list[Record]] = {}
        for record in records:
            if record.kind in (Kind.ATTEMPT, Kind.EVENTS):
                by_owner.setdefault(record.owner, []).append(record)
        if self._state.port:
            self._until_s = now_s + _FOR_S
        for owner, found in by_owner.items():
            found.sort(key=attrgetter("number"))
            first: Attempt | None = None
            if found[0].kind is Kind.ATTEMPT:
                first = pickle.loads(self._state.read(found[0].place))
            if first is None or first.key is None:  # its beginning did not fit
                for record in found:
                    self._state.remove(record.place)
            else:
                kept = StoredReply(first.key, first.names, self._state, owner, found)
                self._earlier.setdefault((first.key, first.names), []).append(kept)

    def of(self, key: Key, names: Names) -> StoredReply:
        """The records of a request, which may be one of the lost router.

        Args:
            names: of the weights that would answer it now.
        """
        if self._earlier and (found := self._earlier.get((key, names))):
            kept = found.pop()
            if not found:
                del self._earlier[key, names]
            return kept
        return StoredReply(key, names, self._state, self._state.new_owner())

    def expire(self, now_s: float) -> None:
        """Remove what no request has come for."""
        if self._earlier and now_s > self._until_s:
            found, self._earlier = self._earlier, {}
            for each in found.values():
                for kept in each:
                    for record in kept.earlier:
                        self._state.remove(record.place)
