"""Why the embedded engine says no.  Each kind is one HTTP status; the message is for a person."""

from __future__ import annotations


class Refusal(Exception):
    """Base: the request was understood and is not carried out.  Nothing has changed."""

    status = 500
    kind = "refused"


class Invalid(Refusal):
    """The request itself is wrong; it would be refused at any time."""

    status = 400
    kind = "invalid_request_error"


class Conflict(Refusal):
    """The request is right but illegal now.  On SGLang many of these end the engine."""

    status = 409
    kind = "illegal_now"


class Ended(Refusal):
    """The generation thread has failed; only a restart helps."""

    status = 503
    kind = "engine_failed"


class Unsupported(Refusal):
    """This engine cannot do it."""

    status = 501
    kind = "not_implemented"


def body(message: str, status: int, kind: str) -> dict[str, object]:
    """The JSON of every error: SGLang's ``error`` object and its ``success``, ``message``."""
    error = {"message": message, "type": kind, "code": status}
    return {"success": False, "message": message, "error": error}
