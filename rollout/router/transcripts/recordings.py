"""Turns of sessions as tokens, so that training on a conversation need not tokenise it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout.router.transcripts.kept_sessions import KeptSession, KeptSessions

_BYTES_PER_TOKEN = 64
"""An id and a log-prob as Python objects, with their part of the lists."""
_BYTES_PER_SESSION = 1024
"""A session without turns; its id comes from the client, and counts in addition."""


@dataclass(eq=False, slots=True)
class _Session(KeptSession):
    turns: list[dict[str, Any]] = field(default_factory=list)


class Recordings(KeptSessions[_Session]):
    """Recorded turns by session id."""

    bytes_full = "recorded turns take {num_bytes} of {max_bytes} bytes; fetch and delete sessions"
    sessions_full = "{} sessions are recorded; fetch and delete some"

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
