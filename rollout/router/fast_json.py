"""JSON from engines and for clients: orjson, because it is much and often, json for the rest.

orjson takes neither NaN, which an engine may tell as a log-prob, nor integers of more than 64
bits; a client's own body is read by ``json`` alone, so that nothing in it is rounded.
"""

from __future__ import annotations

import json
from typing import Any

import orjson


def loads(data: bytes) -> Any:
    """The value.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)


def dumps(value: Any) -> bytes:
    """The value as JSON; NaN becomes null, which every parser takes."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()
