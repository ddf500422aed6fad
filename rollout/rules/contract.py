"""What a request wants of its tokens, beside its sampling: weight versions, a kind of log-probs.

On the wire each field is a header (``X-Min-Weight-Version`` and so on) or a member of the body, on
all generation routes and in sessions.

Always true: a version that is not served yet can be waited for, and one that is past comes no more.
Tokens that were kept over a failover count as the first tokens of the reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engines.protocol.logprob_kind import LogprobKind, read_kind

VERSION_FIELDS = ("min_weight_version", "weight_version", "max_version_lag")
FIELDS = (*VERSION_FIELDS, "logprob_kind")
HEADERS = {field: "x-" + field.replace("_", "-") for field in FIELDS}
"""The header of each field, in lower case."""
MOST_VERSION = 1 << 53


class Fit(StrEnum):
    """Whether weights may answer a request now, later, or never."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Contract:
    """What each token of a reply fulfils, or there is no reply.

    Attributes:
        min_weight_version: the oldest weight version that a token may have.
        weight_version: the only one.
        max_version_lag: how many versions a token may be behind the one that is served as the
            reply ends.
        logprob_kind: kind of the log-probs.

    Raises:
        ValueError: a field is no such value, or contradicts another one; it is named.
    """

    min_weight_version: int | None = None
    weight_version: int | None = None
    max_version_lag: int | None = None
    logprob_kind: LogprobKind | None = None

    def __post_init__(self) -> None:
        for field in VERSION_FIELDS:
            value = getattr(self, field)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 <= value < MOST_VERSION):
                raise ValueError(f"{field} is {value!r:.80}, and takes a whole number from 0")
        least, exact = self.min_weight_version, self.weight_version
        if least is not None and exact is not None and exact < least:
            raise ValueError(
                f"weight_version is {exact}, and min_weight_version {least} excludes it; leave one "
                "of them out"
            )

    @property
    def has_versions(self) -> bool:
        """It limits weight versions."""
        return (
            self.min_weight_version is not None
            or self.weight_version is not None
            or self.max_version_lag is not None
        )

    @property
    def least(self) -> int | None:
        """The oldest version that may answer, where it does not depend on what is served."""
        return self.min_weight_version if self.weight_version is None else self.weight_version

    def fit(self, served: int | None) -> Fit:
        """Whether weights of version ``served`` may generate its next token.

        Args:
            served: None if the version is not known.
        """
        if not self.has_versions:
            return Fit.NOW
        least = self.least
        if served is None or (least is not None and served < least):
            return Fit.LATER
        if self.weight_version is not None and served > self.weight_version:
            return Fit.NEVER
        return Fit.NOW

    def why_broken(self, oldest: int | None, newest: int | None, served: int | None) -> str:
        """Why tokens of these versions do not fulfil it, in words.

        Args:
            oldest, newest: versions of the tokens, or None if they are not known.
            served: the version that is served now, or None if it is not known.
        """
        if not self.has_versions:
            return ""
        exact, least, lag = self.weight_version, self.min_weight_version, self.max_version_lag
        # Only an exact version limits the newest one.
        if oldest is None or (newest is None and exact is not None):
            return "the weight versions of its tokens are not known"
        if exact is not None and not oldest == newest == exact:
            other = oldest if oldest != exact else newest
            return f"a token has weight version {other}, and weight_version is {exact}"
        if least is not None and oldest < least:
            return f"a token has weight version {oldest}, and min_weight_version is {least}"
        if lag is not None and served is not None and oldest < served - lag:
            return (
                f"a token has weight version {oldest}, version {served} is served, and "
                f"max_version_lag is {lag}"
            )
        return ""

    @property
    def words(self) -> str:
        """Its weight versions, for messages."""
        given = [(field, getattr(self, field)) for field in VERSION_FIELDS]
        return " and ".join(f"{field} {value}" for field, value in given if value is not None)

    def to_headers(self) -> dict[str, str]:
        """The headers that say it, with names in lower case."""
        values = {field: getattr(self, field) for field in FIELDS}
        return {HEADERS[field]: str(value) for field, value in values.items() if value is not None}


NO_CONTRACT = Contract()


def contract_of(values: Mapping[str, Any]) -> Contract:
    """The contract of a body's members; others are passed over.

    Raises:
        ValueError: a field is no such value, or contradicts another one; it is named.
    """
    found = {field: values[field] for field in FIELDS if values.get(field) is not None}
    if "logprob_kind" in found:
        kind = read_kind(found["logprob_kind"])
        if kind is None:
            kinds = ", ".join(kind.value for kind in LogprobKind)
            raise ValueError(
                f"logprob_kind is {found['logprob_kind']!r:.80}, and takes one of {kinds}"
            )
        found["logprob_kind"] = kind
    return Contract(**found)
