"""Values of users, such as metadata, as JSON and back.

Always true: what is read equals what was written, with the same types of Python's own.  A value of
JSON stands for itself; any other is a mapping that names its type.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import date, datetime, time
from typing import Any
from uuid import UUID

from engines.plain_json import WRONG_FORM

_TYPE, _VALUE = "$python", "value"
# A reader of JSON need not know larger ones.
_MOST_INT = 1 << 63
_OF_TEXT: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    UUID: (str, UUID),
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda value: int(value, 16),
    "float": float,
    "str": lambda value: bytes.fromhex(value).decode(errors="surrogatepass"),
    "bytes": b64decode,
    "tuple": lambda value: tuple(map(from_plain, value)),
    "dict": lambda value: {from_plain(key): from_plain(part) for key, part in value},
    **{kind.__name__: read for kind, (_, read) in _OF_TEXT.items()},
}


class NotPlainError(ValueError):
    """A value that JSON cannot have, with its place."""


def as_it_is(value: Any, place: str) -> Any:
    """For ``to_plain``: a value that has no JSON is kept."""
    return value


def refuse(value: Any, place: str) -> Any:
    """For ``to_plain``: a value that has no JSON is refused.

    Raises:
        NotPlainError: always.
    """
    raise NotPlainError(f"{place} is a {type(value).__name__}, which is not written as JSON")


def to_plain(value: Any, place: str, unknown: Callable[[Any, str], Any] = refuse) -> Any:
    """A value as JSON.

    Args:
        place: its name, for errors.
        unknown: what becomes of a value that is none of Python's own.

    Raises:
        NotPlainError: from ``refuse``.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if abs(number) < _MOST_INT else _typed("int", hex(number))
    if isinstance(value, float):
        real = float.__float__(value)
        return real if math.isfinite(real) else _typed("float", repr(real))
    if isinstance(value, str):
        return _of_text(str.__str__(value))
    if isinstance(value, bytes):
        return _typed("bytes", b64encode(value).decode())
    if isinstance(value, list | tuple):
        parts = [to_plain(part, f"{place}[{num}]", unknown) for num, part in enumerate(value)]
        return parts if isinstance(value, list) else _typed("tuple", parts)
    if isinstance(value, dict):
        return _of_dict(value, place, unknown)
    if type(value) in _OF_TEXT:
        return _typed(type(value).__name__, _OF_TEXT[type(value)][0](value))
    return unknown(value, place)


def _of_text(text: str) -> Any:
    try:
        text.encode()
    except UnicodeEncodeError:
        return _typed("str", text.encode(errors="surrogatepass").hex())
    return text


def _of_dict(value: dict[Any, Any], place: str, unknown: Callable[[Any, str], Any]) -> Any:
    pairs = [
        (
            to_plain(key, f"a key of {place}", unknown),
            to_plain(part, f"{place}[{key!r:.40}]", unknown),
        )
        for key, part in value.items()
    ]
    if _TYPE not in value and all(isinstance(key, str) for key, _ in pairs):
        return dict(pairs)
    return _typed("dict", [list(pair) for pair in pairs])


def _typed(kind: str, value: Any) -> dict[str, Any]:
    return {_TYPE: kind, _VALUE: value}


def from_plain(value: Any) -> Any:
    """The value that ``to_plain`` made this of.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, list):
        return list(map(from_plain, value))
    if not isinstance(value, dict):
        return value
    if _TYPE not in value:
        return {key: from_plain(part) for key, part in value.items()}
    try:
        return _READERS[value[_TYPE]](value[_VALUE])
    except WRONG_FORM:
        raise ValueError(f"{value!r:.100} is no value that was saved") from None
