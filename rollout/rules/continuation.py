"""Joining the parts of one completion that several engines generated, in driver and router.

Always true:
- Joined version spans ascend and do not overlap; neighbours of one version are one span.
- Ids, columns, spans and routed experts of joined parts are those of the first, then those of the
  second.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engines.protocol import VersionSpan


@dataclass(slots=True)
class Part:
    """Consecutive tokens of one completion.

    Attributes:
        num: how many tokens, as the engine counts them.
        ids: the token ids, or empty where the engine does not report any.
        columns: lists with one entry per token, such as log-probs, by name; they may be of other
            types that can be sliced and joined as lists can.
        spans: the weight version of each token.
    """

    text: str = ""
    num: int = 0
    ids: list[int] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    spans: tuple[VersionSpan, ...] = ()

    def plus(self, other: Part) -> Part:
        """This part with ``other`` behind it; ``other`` itself if this one has no tokens."""
        if not self.num:
            return other
        names = self.columns.keys() | other.columns.keys()
        return Part(
            self.text + other.text,
            self.num + other.num,
            self.ids + other.ids,
            {name: self.columns.get(name, []) + other.columns.get(name, []) for name in names},
            join_spans(self.spans, other.spans, self.num),
        )

    def up_to(self, num: int, num_characters: int) -> Part:
        """A copy of the first ``num`` tokens, whose text has so many characters."""
        num = min(num, self.num)
        return Part(
            self.text[:num_characters],
            num,
            self.ids[:num],
            {name: values[:num] for name, values in self.columns.items()},
            tuple(
                VersionSpan(span.version, span.start, min(span.end, num))
                for span in self.spans
                if span.start < num
            ),
        )


def join_spans(
    first: Iterable[VersionSpan], second: Iterable[VersionSpan], begin: int
) -> tuple[VersionSpan, ...]:
    """Spans of two parts as those of the whole; the second part begins at token ``begin``."""
    spans = list(first)
    for span in second:
        moved = VersionSpan(span.version, span.start + begin, span.end + begin)
        if spans and spans[-1].version == moved.version and spans[-1].end == moved.start:
            spans[-1] = VersionSpan(moved.version, spans[-1].start, moved.end)
        elif moved.end > moved.start:
            spans.append(moved)
    return tuple(spans)


def spans_of(
    reported: tuple[VersionSpan, ...], version: str | None, num: int
) -> tuple[VersionSpan, ...]:
    """The reported spans of ``num`` tokens, or one of ``version`` where none are reported."""
    if reported or version is None or not num:
        return reported
    return (VersionSpan(version, 0, num),)


def join_experts(kept: bytes, reported: bytes, num_tokens: int) -> bytes | None:
    """The routed experts of ``num_tokens``, each from the engine that computed the token first.

    Args:
        kept: those of the first tokens, from earlier engines.
        reported: those of all, from the present engine, which computed the first ones again.

    Returns:
        None if these are not the experts of so many tokens.
    """
    row, rest = divmod(len(reported), num_tokens)
    if not row or rest or len(kept) % row or len(kept) > len(reported):
        return None
    return kept + reported[len(kept) :]


def seed_after(seed: int, num_tokens: int) -> int:
    """The seed of a continuation, so that it does not draw the random numbers of its first tokens
    again."""
    return zlib.crc32(f"{seed}/{num_tokens}".encode())


def check_budget(num: int, budget: int | None) -> None:
    """Check that ``num`` tokens are within the budget; None is no bound.

    Raises:
        ValueError: they are more.
    """
    if budget is not None and num > budget:
        raise ValueError(f"{num} output tokens where at most {budget} were requested")
