"""The contract of one request: how it is read, and which versions its tokens can have (pure).

**Which versions.**  No token is older than the weights that were served at its request's admission.
An engine that reports a version for each token has the last word.  Otherwise none is newer than the
weights that are served now, if the gate is open: weights change only behind a gate that is not
open, so while it is not, the newest version is unknown.  That concerns the replies of OpenAI's
routes, streams of vLLM before their end, and bodies that are passed on.

A field is a header or a member of the body.  Members are taken out of a body that has them, so no
engine gets one; a body without their text is neither parsed nor copied.

Always true: a request has the contract that its client wrote, or gets a 400 that names the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from engines.protocol.logprob_kind import LogprobKind, LogprobRule
from rollout.router.continuation.core import Reported
from rollout.router.continuation.dialects.table import ROUTES
from rollout.router.continuation.forms import read_object
from rollout.router.http.fast_json import dumps
from rollout.router.http.routes import (
    COMPLETION_PATHS,
    TOKENIZER_PATHS,
    WHOLE_JSON_PATHS,
)
from rollout.rules.contract import FIELDS, HEADERS, NO_CONTRACT, Contract, contract_of

# A name in a text has a backslash before its second quote.
_MEMBER = re.compile(rb'"(?:%s)"\s*:' % "|".join(FIELDS).encode())
_MOST_DIGITS = 16
_MOST_ENGINES = 8

Texts = Sequence[tuple[str, str]]
"""Fields of headers, with their values."""


class ReadContract(NamedTuple):
    """What a request says of its contract.

    Attributes:
        body: without the members of the contract; None: it has none.
        problem: why it cannot be kept, with the name of the field, or empty if it can be.
    """

    contract: Contract = NO_CONTRACT
    body: bytes | None = None
    problem: str = ""


NOT_GIVEN = ReadContract()


def read_contract(path: str, texts: Texts, body: bytes, max_bytes: int) -> ReadContract:
    """The contract of a request.

    Args:
        texts: of its headers.
        body: in UTF-8.
        max_bytes: of a longer body no members are read.
    """
    has_members = _MEMBER.search(body) is not None
    if not (texts or has_members):
        return NOT_GIVEN
    try:
        raw = _object_in(body, max_bytes) if has_members else {}
        contract = contract_in(texts, raw)
        _check_path(path, contract, body)
    except ValueError as error:
        return ReadContract(problem=str(error))
    if raw.keys().isdisjoint(FIELDS):
        return ReadContract(contract)
    return ReadContract(
        contract, dumps({name: value for name, value in raw.items() if name not in FIELDS})
    )


def contract_in(texts: Texts, members: Mapping[str, Any]) -> Contract:
    """The contract of headers and of a body's members.

    Raises:
        ValueError: a field is no such value, contradicts another one, or is given twice and
            unequal; it is named.
    """
    found: dict[str, Any] = {}
    for field, text in texts:
        value = _value_of(text)
        if found.setdefault(field, value) != value:
            raise ValueError(
                f"{field} is {found[field]!r:.80} and {value!r:.80} in two headers {HEADERS[field]}"
            )
    for field in FIELDS:
        member = members.get(field)
        if member is None:
            continue
        if field in found and (found[field] != member or isinstance(member, bool)):
            raise ValueError(
                f"{field} is {found[field]!r:.80} in the header {HEADERS[field]} and "
                f"{member!r:.80} in the body; send one of them"
            )
        found[field] = member
    return contract_of(found) if found else NO_CONTRACT


class Versions(NamedTuple):
    """The oldest and the newest version that tokens can have; None: it is not known."""

    oldest: int | None
    newest: int | None

    def joined(self, other: Versions | None) -> Versions:
        """The versions of both."""
        if other is None:
            return self
        return Versions(
            _of_known(min, self.oldest, other.oldest), _of_known(max, self[1], other[1])
        )


def versions_of(
    reported: Reported, admitted: int | None, served: int | None, *, is_open: bool
) -> Versions:
    """The versions that the tokens of one engine can have.

    Args:
        reported: by the engine.
        admitted: at the admission of the request to it.
        served: now, to such a request.
        is_open: the gate is.
    """
    if reported.each:
        numbers = [_number(version) for version in reported.each]
        return Versions(_of_known(min, *numbers), _of_known(max, *numbers))
    if reported.last is not None:
        last = _number(reported.last)
        return Versions(_of_known(min, admitted, last), last)
    return Versions(admitted, served if is_open else None)


def _of_known(choose: Callable[..., int], *numbers: int | None) -> int | None:
    known = [number for number in numbers if number is not None]
    return choose(known) if len(known) == len(numbers) else None


def _number(version: str) -> int | None:
    return int(version) if version.isascii() and version.isdecimal() else None


def why_no_kind(
    wanted: LogprobKind, kinds: Mapping[str, tuple[LogprobKind | None, LogprobRule]]
) -> str:
    """Why no engine can answer a request that wants this kind of log-probs, and what works.

    Args:
        kinds: by engine: the kind that this request would get, and the rule of it, or None if it
            is not known.
    """
    found = {kind for kind, _ in kinds.values()}
    names = sorted({name for _, rule in kinds.values() for name in rule.names})
    engines = ", ".join(list(kinds)[:_MOST_ENGINES])
    would_be = " or ".join(sorted(kind or "of a kind that is not known" for kind in found))
    ways = [f"leave {', '.join(names)} as they are without being set"] if names else []
    ways += [f"send logprob_kind {kind}" for kind in sorted(filter(None, found))]
    if None in found:
        ways.append("send one prompt, in a body of at most router.max_read_bytes")
    return (
        f"logprob_kind is {wanted}, and the log-probs of this request would be {would_be} on "
        f"{engines}; {', or '.join(ways)}"
    )


def _value_of(text: str) -> int | str:
    """A header's value: a number, if it is one in decimal digits."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    return int(text) if is_number else text


def _object_in(body: bytes, max_bytes: int) -> dict[str, Any]:
    raw = read_object(body) if len(body) <= max_bytes else None
    if raw is None:
        found = _MEMBER.search(body)
        name = found[0].split(b'"')[1].decode() if found else FIELDS[0]
        raise ValueError(
            f"{name} is in a body that the router does not read: it is no JSON object, or has over "
            f"{max_bytes} bytes; send the header {HEADERS[name]}"
        )
    return raw


def _check_path(path: str, contract: Contract, body: bytes) -> None:
    """Check that the contract can be kept on this path.

    Raises:
        ValueError: it cannot; the field is named.
    """
    if contract.logprob_kind is not None and path not in ROUTES:
        raise ValueError(
            f"logprob_kind: the router does not know the kind of log-probs of {path}; use "
            f"{', '.join(sorted(ROUTES))}"
        )
    if not contract.has_versions or path in COMPLETION_PATHS:
        return
    wanted = contract.words
    if path in TOKENIZER_PATHS:
        raise ValueError(f"{wanted}: no weights answer {path}; leave it out")
    if path not in WHOLE_JSON_PATHS:
        paths = ", ".join(sorted(COMPLETION_PATHS | WHOLE_JSON_PATHS))
        raise ValueError(f"{wanted}: the router cannot check replies of {path}; use {paths}")
    raw = read_object(body)
    if raw is None:
        raise ValueError(f"{wanted}: the body is no JSON object that the router can read")
    if raw.get("stream"):
        raise ValueError(
            f"{wanted}: the router cannot check a stream of {path}; leave stream out, or use "
            f"{', '.join(sorted(COMPLETION_PATHS))}"
        )
