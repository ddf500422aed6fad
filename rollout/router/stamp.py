"""What the router writes into the body of a completion request, without decoding it.

- ``rid``, unless the client gave one: 32 hex digits.  SGLang aborts by prefix, so ids that are
  handed out must all be of one width, or aborting one ends others.
- ``extra_key``, unless the client gave one: the weight version.  It is part of SGLang's prefix
  cache key, so that cached KV of two versions never mixes.

Both are put at the front of the JSON object.  A client's own key is looked for as text, and the
body is parsed only if that text is there, elsewhere than as the first or the last member.  Should
a client spell its key with escapes, so that the text is not, its value still wins: of equal keys
JSON parsers keep the last.
"""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache

import orjson

MAX_PARSED_BYTES = 1 << 20
_OPENS = re.compile(rb"\s*\{")
_CLOSES = re.compile(rb"\s*\}")
_LONGEST_PLAIN_VALUE = 256
_random = random.Random(random.SystemRandom().getrandbits(256))


def new_rid() -> str:
    return f"{_random.getrandbits(128):032x}"


def is_stampable(body: bytes) -> bool:
    """The body looks like a JSON object."""
    return _OPENS.match(body) is not None


def find(body: bytes, key: str) -> tuple[bool, object]:
    """Whether the object has ``key``, and its value where that is known.

    A body too long to parse that has the key's text somewhere counts as having the key.
    """
    quoted, first, last = _patterns(key)
    at = body.find(quoted)
    if at < 0:
        return False, None
    if body.find(quoted, at + 1) < 0:  # only here, so no later one can take its place
        found = first.match(body)
        if found is None and len(body) - at <= _LONGEST_PLAIN_VALUE:
            found = last.match(body, at)
        if found is not None:
            return True, found[1].decode()
    if len(body) > MAX_PARSED_BYTES:
        return True, None
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return True, None
    return key in parsed, parsed.get(key)


@lru_cache
def _patterns(key: str) -> tuple[bytes, re.Pattern[bytes], re.Pattern[bytes]]:
    """The key's text; the key as first member; the key as last one, before the outermost end."""
    pair = rf'"{key}"\s*:\s*"([ !#-\[\]-~]*)"'
    return (
        f'"{key}"'.encode(),
        re.compile(rf"\s*\{{\s*{pair}\s*[,}}]".encode()),
        re.compile(rf"{pair}\s*\}}\s*\Z".encode()),
    )


def stamp(body: bytes, **values: str | int) -> bytes:
    """``body`` with ``values`` as its first members."""
    opening = _OPENS.match(body)
    if not values or opening is None:
        return body
    front = orjson.dumps(values)[:-1]
    comma = b"" if _CLOSES.match(body, opening.end()) else b","
    return b"".join((front, comma, body[opening.end() :]))
