"""The sessions of one worker by id, within bounds.

Always true: at most ``max_bytes`` and ``max_sessions`` are kept, and of closed ones only digests.
When either is reached, a further turn is refused before it is generated.  A session is kept until
it is deleted or has been idle for ``ttl_s``; one with a turn under way is not idle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from rollout.agents.model.alignment import Drift
from rollout.agents.turns.tree import TurnTree

MAX_ID_CHARACTERS = 256
_BYTES_PER_SESSION = 4096
"""With the longest id, the longest name of its weights, and the entry that an index has of it."""
_MOST_EXPIRED_AT_ONCE = 32


@dataclass(eq=False, slots=True)
class Session:
    """One session, with its turns.

    Attributes:
        seen_s: end of its last turn.
        num_bytes: at the end of its last turn.
        num_running: turns under way.
        pinned: the version of an adapter that it stays with, as ``lora_path`` takes it; None for
            the base.  Empty: it stays with none.
    """

    seen_s: float
    num_bytes: int = 0
    num_running: int = 0
    pinned: tuple[()] | tuple[str | None] = ()
    tree: TurnTree = field(default_factory=TurnTree)


class SessionStore:
    """Sessions, in the order of ``seen_s``.

    Args:

    Attributes:
        on_end: called with the id of a session that has ended.
        num_turns: finished turns of all sessions so far, also of closed ones, by drift.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        max_sessions: int,
        ttl_s: float,
    ) -> None:
        self.on_end: Callable[[str], None] = lambda session_id: None
        self._max_bytes = max_bytes
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._closed: OrderedDict[bytes, None] = OrderedDict()
        self.num_bytes = 0
        self.num_turns = dict.fromkeys(Drift, 0)

    def why_full(self, session_id: str, now_s: float) -> str:
        """Why another turn of this session cannot be kept; empty if it can."""
        self.expire(now_s)
        if self.num_bytes >= self._max_bytes:
            return (
                f"sessions take {self.num_bytes} of {self._max_bytes} bytes "
                "(agents.max_session_bytes); take their samples and close them"
            )
        if session_id not in self._sessions and len(self._sessions) >= self._max_sessions:
            return f"{len(self._sessions)} sessions are open (agents.max_sessions); close some"
        return ""

    def why_closed(self, session_id: str) -> str:
        """Why this session takes no further turn; empty if it does."""
        if _digest(session_id) not in self._closed:
            return ""
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
        """Delete a session; the last ``max_sessions`` ids that were closed take no further turn.

        Returns:
            Whether there was one; no other id is kept, so that those of strangers displace none.
        """
        if not self.delete(session_id):
            return False
        self._closed[_digest(session_id)] = None
        if len(self._closed) > self._max_sessions:
            self._closed.popitem(last=False)
        return True

    def delete(self, session_id: str) -> bool:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        self.num_bytes -= session.num_bytes
        self.on_end(session_id)
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


def _digest(session_id: str) -> bytes:
    return blake2b(session_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
