"""What the router answers by itself: JSON with ``error``, whose ``type`` tells the kinds apart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rollout.router.gate import ConnectionFailure, Refusal
from rollout.router.headers import Headers, reply_head


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of the router's own."""

    status: int
    payload: dict[str, Any]
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def to_bytes(self, *, is_head: bool = False, is_last: bool = False) -> bytes:
        """As it goes over the wire; ``is_last`` says that the connection closes after it."""
        body = json.dumps(self.payload).encode()
        headers: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self.headers,
        ]
        close = (b"connection: close\r\n",) if is_last else ()
        return reply_head(self.status, headers, *close) + (b"" if is_head else body)


def problem(status: int, kind: str, message: str) -> Answer:
    return Answer(status, {"error": {"type": kind, "message": message}})


def unauthorized() -> Answer:
    error = {"type": "unauthorized", "message": "a bearer key is needed: Authorization: Bearer KEY"}
    return Answer(401, {"error": error}, ((b"www-authenticate", b"Bearer"),))


def refused(refusal: Refusal) -> Answer:
    """503 and when to come again; 499 for an abort."""
    error = {
        "type": "aborted" if refusal.is_abort else "unavailable",
        "message": refusal.message,
        "gate": refusal.gate.value,
        "reason": refusal.reason,
        "phase": refusal.phase,
    }
    if refusal.is_abort:
        return Answer(499, {"error": error})
    retry_after = (b"retry-after", str(refusal.retry_after_s).encode())
    return Answer(503, {"error": error}, (retry_after,))


def engine_failed(failure: ConnectionFailure, status: int = 502) -> Answer:
    """It names the engine, in the body and in a header."""
    message = f"engine {failure.engine_id} failed {failure.operation}: {failure.message}"
    error = {"type": "engine_failure", "engine": failure.engine_id, "message": message}
    return Answer(status, {"error": error}, ((b"x-engine-id", failure.engine_id.encode()),))
