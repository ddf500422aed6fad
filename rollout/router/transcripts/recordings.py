"""Turns of sessions as tokens, so that training on a conversation need not tokenise it again.

Always true: at most ``max_bytes`` and ``max_sessions`` are kept.  When either is reached, a further
turn is refused before it is generated.  A recorded turn is kept until its session is deleted or has
been idle for ``ttl_s``.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

_BYTES_PER_TOKEN = 64
"""An id and a log-prob as Python objects, with their part of the lists."""
_BYTES_PER_SESSION = 1024
"""A session without turns; its id comes from the client, and counts in addition."""


@dataclass(slots=True)
class _Session:
    seen_s: float
    turns: list[dict[str, Any]] = field(default_factory=list)
    num_bytes: int = 0


class Recordings:
    """Recorded turns by session id."""

    def __init__(self, *, max_bytes: int, max_sessions: int, ttl_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self.num_bytes = 0

    def why_full(self, session_id: str, now_s: float) -> str:
        """Why another turn of this session cannot be recorded; empty if it can."""
        self.expire_sessions(now_s)
        if self.num_bytes >= self._max_bytes:
            return (
                f"recorded turns take {self.num_bytes} of {self._max_bytes} bytes; "
                "fetch and delete sessions"
            )
        if session_id not in self._sessions and len(self._sessions) >= self._max_sessions:
            return f"{len(self._sessions)} sessions are recorded; fetch and delete some"
        return ""

    def add(self, session_id: str, turn: dict[str, Any], now_s: float) -> None:
        """Record one complete turn: ``input_ids``, ``output_ids`` and their fields."""
        session = self._sessions.get(session_id)
        if session is None:
            num_bytes = _BYTES_PER_SESSION + len(session_id)
            session = self._sessions[session_id] = _Session(now_s, num_bytes=num_bytes)
            self.num_bytes += num_bytes
        session.seen_s = now_s
        self._sessions.move_to_end(session_id)
        num_bytes = _BYTES_PER_TOKEN * (len(turn["input_ids"]) + len(turn["output_ids"]) + 4)
        session.turns.append(turn)
        session.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def get(self, session_id: str) -> list[dict[str, Any]] | None:
        session = self._sessions.get(session_id)
        return None if session is None else session.turns

    def delete(self, session_id: str) -> bool:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        self.num_bytes -= session.num_bytes
        return True

    def expire_sessions(self, now_s: float) -> None:
        """Delete sessions that have been idle for too long."""
        while self._sessions:
            session_id, session = next(iter(self._sessions.items()))
            if session.seen_s > now_s - self._ttl_s:
                return
            self.delete(session_id)
