"""Sessions by id, within bounds: what recorded turns and chats of agents share.

Always true: at most ``max_bytes`` and ``max_sessions`` are kept.  When either is reached, a further
turn is refused before it is generated.  A session is kept until it is deleted or has been idle for
``ttl_s``; one with a turn under way is not idle.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar


@dataclass(eq=False, slots=True)
class KeptSession:
    """One session.

    Attributes:
        seen_s: end of its last turn.
        num_bytes: at the end of its last turn.
        num_running: turns under way.
    """

    seen_s: float
    num_bytes: int = 0
    num_running: int = 0


S = TypeVar("S", bound=KeptSession)


class KeptSessions(Generic[S]):
    """Sessions, in the order of ``seen_s``."""

    bytes_full: ClassVar[str]
    """Why there is no room for bytes, with ``num_bytes`` and ``max_bytes`` as fields."""
    sessions_full: ClassVar[str]
    """Why there is no room for a session, with their number as a field."""

    def __init__(self, *, max_bytes: int, max_sessions: int, ttl_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._sessions: OrderedDict[str, S] = OrderedDict()
        self.num_bytes = 0

    def why_full(self, session_id: str, now_s: float) -> str:
        """Why another turn of this session cannot be kept; empty if it can."""
        self.expire(now_s)
        if self.num_bytes >= self._max_bytes:
            return self.bytes_full.format(num_bytes=self.num_bytes, max_bytes=self._max_bytes)
        if session_id not in self._sessions and len(self._sessions) >= self._max_sessions:
            return self.sessions_full.format(len(self._sessions))
        return ""

    def delete(self, session_id: str) -> bool:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        self.num_bytes -= session.num_bytes
        return True

    def expire(self, now_s: float) -> None:
        """Delete sessions that have been idle for too long."""
        since_s = now_s - self._ttl_s
        expired = []
        for session_id, session in self._sessions.items():
            if session.seen_s > since_s:
                break
            if not session.num_running:
                expired.append(session_id)
        for session_id in expired:
            self.delete(session_id)
