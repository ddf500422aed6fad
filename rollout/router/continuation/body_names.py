"""The names of members that the router needs of bodies that it does not parse: one search for all.

A member whose name is spelled with escapes is not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from engines.protocol.logprob_kind import LogprobRule
from rollout.router.continuation.fatal_values import BOUNDED
from rollout.router.http.request import FOUND_NAMES
from rollout.rules.contract import FIELDS

_MOST_CHANGED = LogprobRule(has_temperature=False, has_penalties=True, has_cuts=True)
_NEEDED = ("rid", "request_id", *FOUND_NAMES, *FIELDS, *_MOST_CHANGED.names)
SEARCHED = frozenset({*(name.encode() for name in _NEEDED), *BOUNDED})
"""Names of members that the router needs of a body that it does not parse."""
_LEAST_LEFT_OUT = 128


def _pattern_of(names: Iterable[bytes]) -> re.Pattern[bytes]:
    """One of these names in quotes; by its first letter, which is twice as fast as a plain list."""
    by_letter: dict[str, list[str]] = {}
    for name in sorted(name.decode() for name in names):
        by_letter.setdefault(name[0], []).append(name[1:])
    each = "|".join(f"{letter}(?:{'|'.join(rest)})" for letter, rest in by_letter.items())
    return re.compile(f'"(?=[{"".join(by_letter)}])({each})"'.encode())


_SEARCHED = _pattern_of(SEARCHED)


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

    It is one pass for all of them.
    """
    return frozenset(_SEARCHED.findall(outline))
