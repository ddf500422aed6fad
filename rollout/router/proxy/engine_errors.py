"""Replies of engines that are errors: whose fault they are, and whether the engine is lost (pure).

Always true: the payload may have any form; nothing here raises.
"""

from __future__ import annotations

from typing import Any

from rollout.router.http.fast_json import loads

_ERROR_EVENT = b'data: {"error"'
_LONGEST_CHUNK_SIZE = 16  # a size in hexadecimal, and the end of its line
_DEAD = "EngineCore encountered an issue"
_NOT_FINITE = "not_finite"  # of the embedded engine, whose logits are NaN


def is_own_error(status: int) -> bool:
    """Whether a reply with this status is the engine's failure, and not the request's."""
    return status >= 500 and status != 501


def first_error(data: bytes) -> Any:
    """The first event of a stream, if it is an error; else None.

    Args:
        data: the first bytes of the body, which may have the size of their chunk before them.
    """
    begin = data.find(_ERROR_EVENT, 0, _LONGEST_CHUNK_SIZE + len(_ERROR_EVENT))
    return None if begin < 0 else read_error(data[begin + 6 :].partition(b"\n")[0])


def read_error(body: bytes) -> Any:
    """The payload of an error, or None if it is not JSON."""
    try:
        return loads(body)
    except ValueError:
        return None


def status_of(payload: Any) -> int:
    """The status that an event with this error would have as a whole reply."""
    code = _field(payload, "code")
    return code if isinstance(code, int) and 400 <= code <= 599 else 500


def why_lost(payload: Any, *, outlives_its_core: bool) -> str:
    """Why an error says that the engine is lost.

    vLLM's API server outlives its engine core, and answers every request with this error until it
    has ended (0.32.0).  That of SGLang ends with any of its processes.  Our own engines name what
    they have computed.

    Args:
        outlives_its_core: engines of this kind do.
    """
    message = _field(payload, "message")
    if not isinstance(message, str) or _field(payload, "code") != 500:
        return ""
    is_dead = outlives_its_core and message.startswith(_DEAD)
    is_lost = is_dead or _field(payload, "type") == _NOT_FINITE
    return f"it answered: {message[:200]}" if is_lost else ""


def _field(payload: Any, name: str) -> Any:
    error = payload.get("error") if isinstance(payload, dict) else None
    return error.get(name) if isinstance(error, dict) else None
