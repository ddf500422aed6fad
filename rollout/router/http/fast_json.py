"""JSON from engines and for clients: orjson for speed, json where orjson refuses.

orjson takes neither NaN, which an engine may report as a log-prob, nor integers of more than 64
bits.  A client's own body is read by ``json`` alone, so that nothing in it is rounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
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


def dumps(value: Any) -> bytes:
    """The value as JSON; NaN becomes null, which every parser takes.

    Raises:
        ValueError: it is nested too deep.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        text: str = _within_depth(json.dumps, value)
        return text.encode()


def _within_depth(convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value)
    except RecursionError:
        raise ValueError("JSON is nested too deep") from None
