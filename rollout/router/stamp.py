"""What the router writes into the body of ``POST /generate``, without decoding it.

- ``rid``, unless the client gave one: 32 hex digits.  SGLang aborts by prefix, so ids that are
  handed out must all be of one width, or aborting one ends others.
- ``extra_key``, unless the client gave one: the weight version.  It is part of SGLang's prefix
  cache key, so that cached KV of two versions never mixes.

Both are put at the front of the JSON object.  A client's own key is looked for as text, and the
body is parsed only if that text is there.  Should a client spell its key with escapes, so that
the text is not, its value still wins: of equal keys JSON parsers keep the last.
"""

from __future__ import annotations

import json
import re
import uuid

MAX_PARSED_BYTES = 1 << 20
_OPENS = re.compile(rb"\s*\{")
_CLOSES = re.compile(rb"\s*\}")


def new_rid() -> str:
    return uuid.uuid4().hex


def is_stampable(body: bytes) -> bool:
    """The body looks like a JSON object."""
    return _OPENS.match(body) is not None


def find(body: bytes, key: str) -> tuple[bool, object]:
    """Whether the object has ``key``, and its value where that is known.

    A body too long to parse that has the key's text somewhere counts as having the key.
    """
    if f'"{key}"'.encode() not in body:
        return False, None
    if len(body) > MAX_PARSED_BYTES:
        return True, None
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return True, None
    return key in parsed, parsed.get(key)


def stamp(body: bytes, **values: str) -> bytes:
    """``body`` with ``values`` as its first members."""
    opening = _OPENS.match(body)
    if not values or opening is None:
        return body
    front = json.dumps(values).encode()[:-1]
    comma = b"" if _CLOSES.match(body, opening.end()) else b", "
    return front + comma + body[opening.end() :]
