"""A turn without an answer, as a response (pure)."""

from __future__ import annotations

from rollout.router.http.fast_json import dumps

MOST_AT_ONCE = 4096
"""Chats under way in one worker."""


class ChatFailure(Exception):
    """A turn without an answer, and the response that says so."""

    def __init__(self, status: int, body: bytes, retry_after: str = "") -> None:
        super().__init__(body[:200].decode(errors="replace"))
        self.status = status
        self.body = body
        self.retry_after = retry_after


def failure(status: int, kind: str, message: str, retry_after: str = "") -> ChatFailure:
    body = dumps({"error": {"type": kind, "message": message}})
    return ChatFailure(status, body, retry_after)
