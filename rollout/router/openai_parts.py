"""Tokens in a row as OpenAI's routes tell them: text, log-probs, and ids where there are any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.router.tokens import Payload, join_spans


@dataclass(slots=True)
class Part:
    """Tokens in a row.

    Attributes:
        num: how many, as the engine counts them.
        ids: the same; empty for a chat.
        logprobs: the lists of the choice's ``logprobs``, by name.
    """

    text: str = ""
    num: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    spans: list[Payload] = field(default_factory=list)

    def plus(self, other: Part) -> Part:
        names = self.logprobs.keys() | other.logprobs.keys()
        return Part(
            self.text + other.text,
            self.num + other.num,
            self.ids + other.ids,
            {name: self.logprobs.get(name, []) + other.logprobs.get(name, []) for name in names},
            join_spans(self.spans, other.spans, self.num),
        )

    def mark(self) -> Mark:
        """Where it ends now."""
        lengths = {name: len(values) for name, values in self.logprobs.items()}
        return Mark(len(self.text), self.num, len(self.ids), lengths)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a part that grows: marking each event costs less than a copy of all before it."""

    text: int = 0
    num: int = 0
    ids: int = 0
    logprobs: Mapping[str, int] = field(default_factory=dict)


def after(before: Any, now: Any, start: int) -> Any:
    """What stands from ``start`` on in two texts or lists that follow each other."""
    if start >= len(before):
        return now[start - len(before) :]
    return before[start:] + now
