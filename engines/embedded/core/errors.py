"""Errors of the embedded engine.  Each class is one HTTP status; the message is for a person."""

from __future__ import annotations


class EngineRefusal(Exception):
    """Base class: the request was not carried out, and nothing has changed."""

    status = 500
    kind = "refused"

    def body(self) -> dict[str, object]:
        """The JSON of every error: SGLang's ``error`` object and its ``success``, ``message``."""
        message = str(self)
        error = {"message": message, "type": self.kind, "code": self.status}
        return {"success": False, "message": message, "error": error}


class Invalid(EngineRefusal):
    """The request itself is wrong; it would be refused at any time."""

    status = 400
    kind = "invalid_request_error"


class Conflict(EngineRefusal):
    """The request is right but illegal now.  On SGLang many of these end the engine."""

    status = 409
    kind = "illegal_now"


class EngineFailed(EngineRefusal):
    """The generation thread has failed; only a restart helps."""

    status = 503
    kind = "engine_failed"


class NotFinite(EngineRefusal):
    """The model has computed NaN: its weights are lost or damaged."""

    kind = "not_finite"


class Unsupported(EngineRefusal):
    """This engine does not support it."""

    status = 501
    kind = "not_implemented"
