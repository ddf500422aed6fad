"""The sessions of one router by id, within bounds.

Always true: at most ``max_bytes`` and ``max_sessions`` are kept.  When either is reached, a further
turn is refused before it is generated.  A session is kept until it is deleted or has been idle for
``ttl_s``; one with a turn under way is not idle.  A turn is in the state that outlives the router
before its answer is sent; a session is restored with all of its turns, or refused.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from engines.protocol.adapter_names import Names
from rollout.router.sessions.alignment import Drift
from rollout.router.sessions.tree import Turn, TurnTree
from rollout.router.state.state_file import Kind, Record, StateFile

_BYTES_PER_SESSION = 2048
_MOST_EXPIRED_AT_ONCE = 32
# Behind the id, which is printable.
_NOT_WHOLE = b"\0"


@dataclass(eq=False, slots=True)
class Session:
    """One session, with its turns.

    Attributes:
        seen_s: end of its last turn.
        num_bytes: at the end of its last turn.
        num_running: turns under way.
        places: of its records, of which the first has its id; none without such a state.
        owner: of these; 0 if not all of its turns are there.
        names: of the weights that it stays with, as engines know them; empty for none.
    """

    seen_s: float
    num_bytes: int = 0
    num_running: int = 0
    places: list[int] = field(default_factory=list)
    owner: int = 0
    names: Names = ()
    tree: TurnTree = field(default_factory=TurnTree)


class SessionStore:
    """Sessions, in the order of ``seen_s``.

    Args:
        on_end: called with the weights that an ended session has stayed with.

    Attributes:
        num_turns: finished turns of all sessions so far, also of closed ones, by drift.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        max_sessions: int,
        ttl_s: float,
        on_end: Callable[[Names], None] = lambda names: None,
        state: StateFile | None = None,
    ) -> None:
        self._state = state
        self._lost: dict[str, int] = {}
        self._on_end = on_end
        self._max_bytes = max_bytes
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()
        self.num_bytes = 0
        self.num_turns = dict.fromkeys(Drift, 0)

    def load(self, records: Iterable[Record], now_s: float) -> None:
        """Restore the sessions of a lost router, and note those that are not whole."""
        by_owner: dict[int, list[Record]] = {}
        for record in records:
            if record.kind is Kind.SESSION:
                by_owner.setdefault(record.owner, []).append(record)
        for owner, of_session in by_owner.items():
            self._restore(owner, sorted(of_session, key=attrgetter("number")), now_s)

    def _restore(self, owner: int, records: list[Record], now_s: float) -> None:
        assert self._state is not None
        data = [self._state.read(record.place) for record in records]
        places = [record.place for record in records]
        is_whole = [record.number for record in records] == [*range(len(records))]
        if data[0].endswith(_NOT_WHOLE):
            self._lost[data[0][:-1].decode()] = places.pop(0)
        elif is_whole and len(records) > 1:
            session = self._sessions[data[0].decode()] = Session(now_s, places=places, owner=owner)
            for turn in data[1:]:
                session.tree.restore(pickle.loads(turn))
            self._count(session)
            return
        for place in places:  # it was being deleted, or has no turn
            self._state.remove(place)

    def keep(self, session_id: str, session: Session, turn: Turn) -> None:
        """Write a turn into what outlives this router, before its answer is sent."""
        state = self._state
        if state is None or self._sessions.get(session_id) is not session:
            return
        name = session_id.encode()
        if turn.number == 0:
            session.owner = state.new_owner()
            room = len(name + _NOT_WHOLE)
            session.places = [state.put(Kind.SESSION, session.owner, 0, name, room)]
        if not session.owner:
            return
        first, place = session.places[0], 0
        if first and not session.names:  # the next router knows nothing of weights to stay with
            data = pickle.dumps(turn, pickle.HIGHEST_PROTOCOL)
            place = state.put(Kind.SESSION, session.owner, turn.number + 1, data)
        if place:
            session.places.append(place)
            return
        session.owner = 0
        if first:
            state.extend(first, len(name), _NOT_WHOLE)
        while len(session.places) > 1:
            state.remove(session.places.pop())

    def why_lost(self, session_id: str) -> str:
        """Why the turns of this session are gone; empty if they are not."""
        if session_id not in self._lost:
            return ""
        return f"session {session_id} was lost with its router, and its tokens; begin another one"

    def why_full(self, session_id: str, now_s: float) -> str:
        """Why another turn of this session cannot be kept; empty if it can."""
        self.expire(now_s)
        if self.num_bytes >= self._max_bytes:
            return (
                f"sessions take {self.num_bytes} of {self._max_bytes} bytes "
                "(router.max_session_bytes); take their samples and close them"
            )
        if session_id not in self._sessions and len(self._sessions) >= self._max_sessions:
            return f"{len(self._sessions)} sessions are open (router.max_sessions); close some"
        return ""

    def why_closed(self, session_id: str) -> str:
        """Why this session takes no further turn; empty if it does."""
        if session_id not in self._closed:
            return self.why_lost(session_id)
        return (
            f"session {session_id} was closed, so this turn would not be collected; give each "
            "conversation an id of its own"
        )

    def begin_turn(self, session_id: str, now_s: float) -> Session:
        """The session, which is made if there is none.

        ``end_turn`` must follow; a session without a turn ends with it.
        """
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = Session(now_s)
            self._count(session)
        session.num_running += 1
        return session

    def end_turn(self, session_id: str, session: Session, now_s: float) -> None:
        session.num_running -= 1
        session.seen_s = now_s
        if self._sessions.get(session_id) is session:  # it was not deleted meanwhile
            self._sessions.move_to_end(session_id)
            self._count(session)
            if not (session.tree.turns or session.num_running):
                self.delete(session_id)

    def _count(self, session: Session) -> None:
        num_bytes = _BYTES_PER_SESSION + session.tree.num_bytes
        self.num_bytes += num_bytes - session.num_bytes
        session.num_bytes = num_bytes

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def close(self, session_id: str) -> bool:
        """Delete a session; of the last ``max_sessions`` closed ones, the ids are kept."""
        self._closed[session_id] = None
        if len(self._closed) > self._max_sessions:
            self._closed.popitem(last=False)
        return self.delete(session_id)

    def delete(self, session_id: str) -> bool:
        session = self._sessions.pop(session_id, None)
        lost = self._lost.pop(session_id, 0)
        if self._state is not None:
            # The id first: without it the others are nothing.
            for place in (lost,) if session is None else session.places:
                self._state.remove(place)
        if session is None:
            return lost > 0
        self.num_bytes -= session.num_bytes
        self._on_end(session.names)
        return True

    def expire(self, now_s: float) -> None:
        """Delete sessions that have been idle for too long, some of them at a time."""
        since_s = now_s - self._ttl_s
        expired: list[str] = []
        for session_id, session in self._sessions.items():
            if session.seen_s > since_s or len(expired) == _MOST_EXPIRED_AT_ONCE:
                break
            if not session.num_running:
                expired.append(session_id)
        for session_id in expired:
            self.delete(session_id)
