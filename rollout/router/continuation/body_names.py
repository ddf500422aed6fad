"""The names of members that the router needs of bodies that it does not parse: one search for all.

A member whose name is spelled with escapes is not found.
"""

from __future__ import annotations

import re
from functools import lru_cache

from engines.protocol.logprob_kind import LogprobRule
from rollout.router.continuation.fatal_values import BOUNDED
from rollout.router.http.headers import one_of
from rollout.router.http.request import FOUND_NAMES
from rollout.rules.contract import FIELDS

_MOST_CHANGED = LogprobRule(has_temperature=False, has_penalties=True, has_cuts=True)
_NEEDED = ("rid", "request_id", *FOUND_NAMES, *FIELDS, *_MOST_CHANGED.names)
SEARCHED = frozenset({*(name.encode() for name in _NEEDED), *BOUNDED})
"""Names of members that the router needs of a body that it does not parse."""
_LEAST_LEFT_OUT = 128
_SHORT = 512


_SEARCHED = re.compile(b'"(%s)"' % one_of(SEARCHED))


def outline_of(body: bytes) -> bytes:
    """A body without its token ids.

    What it lacks is a list of numbers, or of lists of them (or a text without quotes): that has no
    quotes, so no name of a member.  The outline is searched, and never parsed.
    """
    begin = body.find(b"[") + 1 if len(body) > _LEAST_LEFT_OUT else 0
    if begin:
        quote = body.find(b'"', begin)
        end = body.rfind(b"]", begin, len(body) if quote < 0 else quote)
        if end - begin > _LEAST_LEFT_OUT:
            return body[:begin] + body[end:]
    return body


def names_in(outline: bytes) -> frozenset[bytes]:
    """The names of ``SEARCHED`` that stand in quotes, so that the body may have such members.

    It is one pass for all of them; training sends many bodies of one short outline.
    """
    return _names_in_short(outline) if len(outline) <= _SHORT else _names_in(outline)


def _names_in(outline: bytes) -> frozenset[bytes]:
    return frozenset(_SEARCHED.findall(outline))


_names_in_short = lru_cache(256)(_names_in)
