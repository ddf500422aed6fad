"""The ids of a prompt that continues known ids, and its difference from a new tokenisation (pure).

Always true: a continuation begins with the known ids.  What the template does to earlier messages
has no part in it: a mark takes the place of the last answer, and only what the template writes
behind the mark is tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

from rollout.router.sessions.messages import BadChat, Message


class Drift(StrEnum):
    """How a prompt compares with what the template and the tokenizer make of the same messages.

    ``clean``: the same ids.  ``realigned``: other ids; those that the engine generated are used.
    ``forked``: the client changed an answer, so its ids are those of a new tokenisation.
    """

    CLEAN = "clean"
    REALIGNED = "realigned"
    FORKED = "forked"


class Template(Protocol):
    """A chat template with its tokenizer."""

    def render(self, messages: Sequence[Message], *, for_answer: bool) -> str:
        """The text of the messages, with the beginning of an answer if ``for_answer``."""
        ...

    def encode(self, text: str) -> list[int]: ...


def continuation(
    template: Template, messages: Sequence[Message], num_known: int, end: int | None, mark: str
) -> list[int] | None:
    """The ids behind those of the first ``num_known`` messages, up to the next answer.

    Args:
        num_known: the last of them is an answer.
        end: the token that ended this answer; None if it was cut off.
        mark: a text that no message contains.

    Returns:
        None if the template does not show where the answer ends.
    """
    calls = messages[num_known - 1].get("tool_calls")
    plain: dict[str, Any] = {"role": "assistant", "content": mark}
    # Some templates write no content beside calls, others want calls before their results.
    for answer in ([plain | {"tool_calls": calls}] if calls else []) + [plain]:
        history = [*messages[: num_known - 1], answer]
        closing = _behind(mark, template, [*history[:-1], plain], for_answer=False)
        called = _behind(mark, template, history, for_answer=False)
        whole = _behind(mark, template, [*history, *messages[num_known:]], for_answer=True)
        if closing is None or called is None or whole is None or not whole.startswith(called):
            continue
        ids = template.encode(closing + whole[len(called) :])
        return ids[1:] if end is not None and ids[:1] == [end] else ids
    return None


def _behind(
    mark: str, template: Template, messages: Sequence[Message], *, for_answer: bool
) -> str | None:
    """What the template writes behind the mark; None if it writes no mark or refuses."""
    try:
        _, found, rest = template.render(messages, for_answer=for_answer).rpartition(mark)
    except BadChat:
        return None
    return rest if found else None


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Index of the first token that differs; None if there is none."""
    if len(ids) == len(others) and list(ids) == list(others):
        return None
    pairs = zip(ids, others, strict=False)
    shorter = min(len(ids), len(others))
    return next((index for index, (one, other) in enumerate(pairs) if one != other), shorter)


def drift_of(difference: int | None, *, is_fork: bool) -> Drift:
    """The class of a prompt whose first difference is ``difference``."""
    if is_fork:
        return Drift.FORKED
    return Drift.CLEAN if difference is None else Drift.REALIGNED
