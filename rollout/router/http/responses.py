"""Responses that the router makes itself: JSON with ``error``, whose ``type`` is the kind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rollout.router.gate.gate import ConnectionFailure, Refusal
from rollout.router.http.headers import Headers, reply_head
from rollout.router.http.incoming_body import LEAST_BYTES_PER_S, STALLED_S


@dataclass(frozen=True, slots=True)
class RouterResponse:
    """A complete response made by the router."""

    status: int
    payload: dict[str, Any]
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def to_bytes(self, *, is_head: bool = False, is_last: bool = False) -> bytes:
        """Head and body; ``is_last``: the connection closes after it."""
        body = json.dumps(self.payload).encode()
        headers: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self.headers,
        ]
        close = (b"connection: close\r\n",) if is_last else ()
        return reply_head(self.status, headers, *close) + (b"" if is_head else body)


def error(
    status: int,
    kind: str,
    message: str,
    *headers: tuple[bytes, bytes],
    **fields: str | int | None,
) -> RouterResponse:
    """An error with more fields than its type and message, if any."""
    return RouterResponse(status, {"error": {"type": kind, "message": message, **fields}}, headers)


def unauthorized() -> RouterResponse:
    message = "a bearer key is needed: Authorization: Bearer KEY"
    return error(401, "unauthorized", message, (b"www-authenticate", b"Bearer"))


def method_not_allowed(path: str) -> RouterResponse:
    return error(405, "method_not_allowed", f"{path} takes POST", (b"allow", b"POST"))


def late_body() -> RouterResponse:
    message = (
        f"the body stopped for {STALLED_S:.0f} s, or arrived at less than "
        f"{LEAST_BYTES_PER_S >> 10} KiB a second"
    )
    return error(408, "timeout", message)


def router_error(why: str) -> RouterResponse:
    """500: an error of the router's own, which its log has with a traceback."""
    return error(500, "router_error", f"the router failed on this request: {why}")


def refused(refusal: Refusal) -> RouterResponse:
    """503 with the time to retry after; 499 for an abort; 409 for another weight version."""
    if refusal.is_router_error:
        return router_error(refusal.message)
    if refusal.unmet:
        return unmet(refusal.message, refusal.weight_version)
    gate: dict[str, str | int | None] = {
        "gate": refusal.gate.value,
        "reason": refusal.reason,
        "phase": refusal.phase,
    }
    if refusal.needs_push is not None:
        gate["needs_push"] = refusal.needs_push
    if refusal.is_abort:
        return error(499, "aborted", refusal.message, **gate)
    retry_after = (b"retry-after", str(refusal.retry_after_s).encode())
    return error(503, "unavailable", refusal.message, retry_after, **gate)


def unmet(message: str, weight_version: int | None) -> RouterResponse:
    """409: no weights that the request gets fulfil its contract.

    Args:
        weight_version: that would answer it now.
    """
    return error(409, "weight_version", message, weight_version=weight_version)


def no_such_kind(message: str) -> RouterResponse:
    """400: no engine gives log-probs of the kind that the request wants."""
    return error(400, "logprob_kind", message)


def engine_failed(failure: ConnectionFailure, why_not_again: str = "") -> RouterResponse:
    """An error that names the engine, in the body and in a header.

    Args:
        why_not_again: why no other engine gets the request, if that has its own reason.
    """
    engine_id = failure.engine_id
    message = f"engine {engine_id} failed {failure.operation}: {failure.message}"
    if why_not_again:
        message += f"; the request is not sent again: {why_not_again}"
    header = (b"x-engine-id", engine_id.encode())
    return error(502, "engine_failure", message, header, engine=engine_id)
