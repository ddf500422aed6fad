"""JSON from engines and for clients: orjson for speed, json where orjson refuses.

orjson takes neither NaN, which an engine may report as a log-prob, nor integers of more than 64
bits.  A client's own body is read by ``json`` alone, so that nothing in it is rounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

Data = bytes | memoryview
"""Bytes, or a part of them without a copy."""


def loads(data: bytes) -> Any:
    """The value.

    Raises:
        ValueError: it is not JSON, or nested too deep.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return _within_depth(json.loads, data)


def strict_loads(data: bytes | str) -> Any:
    """The value, of which every number can be written again.

    Raises:
        ValueError: it is not JSON, as NaN is not, or has a number too large for a float.
        RecursionError: it is nested too deep.
    """
    return json.loads(data, parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"{number:.60} is too large for a float")
    return value


class JsonText:
    """JSON of a long value, which is written as it stands.

    Args:
        data: the text, without what ``around`` puts before and behind it.
    """

    __slots__ = ("around", "data")

    def __init__(self, data: bytes, around: bytes = b"%s") -> None:
        self.data = data
        self.around = around

    @property
    def json(self) -> bytes:
        return self.data if self.around == b"%s" else self.around % self.data


def _as_it_stands(value: Any) -> orjson.Fragment:
    if isinstance(value, JsonText):
        return orjson.Fragment(value.json)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _parsed(value: JsonText) -> Any:
    return json.loads(value.json)


def dumps(value: Any) -> bytes:
    """The value as JSON; NaN becomes null, which every parser takes.

    Raises:
        ValueError: it is nested too deep.
    """
    try:
        return orjson.dumps(value, _as_it_stands)
    except TypeError:
        text: str = _within_depth(partial(json.dumps, default=_parsed), value)
        return text.encode()


def _within_depth(convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value)
    except RecursionError:
        raise ValueError("JSON is nested too deep") from None
