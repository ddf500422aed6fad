"""Which bodies the router reads as the engines do (pure).

Always true of a body that ``read_object`` returns and whose fields have their forms: every engine
reads these fields as the router does, and the body can be written again.  Any other body gets no
transcript: it is forwarded as it is, and the engine decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import orjson

MAX_READ_BYTES = 1 << 20
"""Parsing a longer body would delay the other requests: it gets no transcript."""
_MAX_STOPS = 32  # of SGLang
_MAX_STOP_CHARACTERS = 1024
_MAX_COUNT = 1 << 31

Form = Callable[[Any], bool]


def read_object(body: bytes) -> dict[str, Any] | None:
    """The JSON object in ``body``; None if it is none, is too long or cannot be written again."""
    if len(body) > MAX_READ_BYTES:
        return None
    try:
        # Not orjson, which rounds integers of more than 64 bits.
        raw = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    try:
        orjson.dumps(raw)  # its limit of depth is lower than json's, and does not vary
    except TypeError:
        return None
    return raw if isinstance(raw, dict) else None


def has_forms(raw: Mapping[str, Any], forms: Mapping[str, Form]) -> bool:
    """Whether each of these fields is absent or has its form."""
    return all(form(raw[name]) for name, form in forms.items() if name in raw)


def is_flag(value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)


def is_count(value: Any) -> bool:
    """A number of tokens; not a bool, a float or a text, which engines may take for one."""
    return type(value) is int and 0 <= value < _MAX_COUNT


def is_positive(value: Any) -> bool:
    return is_count(value) and value > 0


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_stop(value: Any) -> bool:
    """Stop strings, of which no engine refuses any, and few enough to compare with every event."""
    stops = [value] if isinstance(value, str) else value
    return (
        isinstance(stops, list)
        and len(stops) <= _MAX_STOPS
        and all(isinstance(stop, str) and stop for stop in stops)
        and sum(map(len, stops)) <= _MAX_STOP_CHARACTERS
    )


def or_none(form: Form) -> Form:
    """The form of a field that may also be null."""
    return lambda value: value is None or form(value)


def token_ids_of(value: Any) -> list[int] | None:
    """The value, if it is one list of token ids."""
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
