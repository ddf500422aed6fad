"""The chats of agents on one router, by session."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.router.sessions.alignment import Drift
from rollout.router.sessions.tree import TurnTree
from rollout.router.transcripts.kept_sessions import KeptSession, KeptSessions

_BYTES_PER_SESSION = 2048


@dataclass(eq=False, slots=True)
class Session(KeptSession):
    """One session, with its turns."""

    tree: TurnTree = field(default_factory=TurnTree)


class SessionStore(KeptSessions[Session]):
    """Sessions by id.

    Attributes:
        num_turns: finished turns of all sessions so far, also of closed ones, by drift.
    """

    bytes_full = (
        "sessions take {num_bytes} of {max_bytes} bytes (router.max_recorded_bytes); "
        "take their samples and close them"
    )
    sessions_full = "{} sessions are open (router.max_sessions); close some"

    def __init__(self, *, max_bytes: int, max_sessions: int, ttl_s: float) -> None:
        super().__init__(max_bytes=max_bytes, max_sessions=max_sessions, ttl_s=ttl_s)
        self.num_turns = dict.fromkeys(Drift, 0)

    def begin_turn(self, session_id: str, now_s: float) -> Session:
        """The session, which is made if there is none.  ``end_turn`` must follow."""
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

    def _count(self, session: Session) -> None:
        num_bytes = _BYTES_PER_SESSION + session.tree.num_bytes
        self.num_bytes += num_bytes - session.num_bytes
        session.num_bytes = num_bytes

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)
