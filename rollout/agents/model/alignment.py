"""The ids of a prompt that continues known ids, and its difference from a new tokenisation (pure).

Always true: a continuation begins with the known ids.  What the template does to earlier messages
has no part in it: a mark takes the place of the last answer, and only what the template writes
behind the mark is tokenised.  The comparison tokenises no text again that it knows to be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Protocol

from rollout.agents.wire.messages import BadChat, Message


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

    def pieces(self, text: str, begin: int = 0) -> Iterator[tuple[str, list[int]]]:
        """The text from a border on, in pieces with their ids; these, joined, are its ids."""
        ...

    def has_border(self, text: str, index: int) -> bool:
        """Whether the ids of the text are those before and those behind the index, joined."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A border in a prompt's text, up to which a new tokenisation gives the prompt's ids.

    Attributes:
        num_ids: ids of the text before it.
        digest: of this text.
    """

    num_characters: int
    num_ids: int
    digest: bytes


_BEGIN = Checkpoint(0, 0, b"")


def tokenised(template: Template, text: str) -> tuple[list[int], list[Checkpoint]]:
    """The ids of a text, and where a comparison with them may begin."""
    ids: list[int] = []
    passed = []
    for checkpoint, new in _behind_checkpoint(template, text, ()):
        passed.append(checkpoint)
        ids += new
    return ids, passed[1:]


def compared(
    template: Template, text: str, ids: Sequence[int], known: Iterable[Checkpoint]
) -> tuple[int | None, list[Checkpoint]]:
    """Index of the first of a prompt's ids that a new tokenisation would not give, or None for
    none.

    Args:
        text: that the template gives now for the prompt.
        known: of prompts whose ids this one begins with.

    Returns:
        the index, and new checkpoints of this prompt.
    """
    passed, num_ids = [], 0
    for checkpoint, new in _behind_checkpoint(template, text, known):
        passed.append(checkpoint)
        num_ids = checkpoint.num_ids + len(new)
        difference = first_difference(ids[checkpoint.num_ids : num_ids], new)
        if difference is not None:
            return checkpoint.num_ids + difference, passed[1:]
    return None if num_ids == len(ids) else num_ids, passed[1:]


def _behind_checkpoint(
    template: Template, text: str, known: Iterable[Checkpoint]
) -> Iterator[tuple[Checkpoint, list[int]]]:
    """The last checkpoint that is the text's own, and those behind it, each with the next ids."""
    checkpoint, digest = _BEGIN, blake2b(digest_size=16)
    reading, at = digest.copy(), 0
    for known_point in sorted(known, key=lambda point: point.num_characters):
        reading.update(_bytes(text[at : known_point.num_characters]))
        at = known_point.num_characters
        if known_point.digest == reading.digest() and template.has_border(text, at):
            checkpoint, digest = known_point, reading.copy()
    for piece, ids in template.pieces(text, checkpoint.num_characters):
        yield checkpoint, ids
        digest.update(_bytes(piece))
        num_characters = checkpoint.num_characters + len(piece)
        checkpoint = Checkpoint(num_characters, checkpoint.num_ids + len(ids), digest.digest())


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Ends:
    """The tokens that end answers, where templates write another one for them in a history.

    Attributes:
        texts: of these tokens.
        ids: the same, and the one in a history.
        closing: text of that one.
    """

    texts: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()
    closing: str = ""

    def as_in_history(self, text: str) -> str:
        """A rendered text that ends with an answer, as it is with messages behind it."""
        found = next((ending for ending in self.texts if text.endswith(ending)), None)
        return text if found is None else text.removesuffix(found) + self.closing


_SAME_ENDS = Ends()


def continuation(
    template: Template,
    messages: Sequence[Message],
    num_known: int,
    end: int | None,
    mark: str,
    ends: Ends = _SAME_ENDS,
) -> list[int] | None:
    """The ids behind those of the first ``num_known`` messages, up to the next answer.

    Args:
        num_known: the last of them is an answer.
        end: the token that ended this answer, or None if it was cut off.
        mark: a text that no message contains.

    Returns:
        None if the template does not show where the answer ends.
    """
    calls = messages[num_known - 1].get("tool_calls")
    plain: dict[str, Any] = {"role": "assistant", "content": mark}
    before, behind = messages[: num_known - 1], messages[num_known:]
    closing = _behind(mark, template, [*before, plain], for_answer=False)
    # Some templates write no content beside calls, others want calls before their results.
    for answer in ([plain | {"tool_calls": calls}] if calls else []) + [plain]:
        called = closing
        if answer is not plain:
            called = _behind(mark, template, [*before, answer], for_answer=False)
        whole = _behind(mark, template, [*before, answer, *behind], for_answer=True)
        if closing is None or called is None or whole is None:
            continue
        called = called if whole.startswith(called) else ends.as_in_history(called)
        if not whole.startswith(called):
            continue
        ids, _ = tokenised(template, ends.as_in_history(closing) + whole[len(called) :])
        is_ended = end is not None and (ids[:1] == [end] or {end, *ids[:1]} <= ends.ids)
        return ids[1:] if is_ended else ids
    return None


def _behind(
    mark: str, template: Template, messages: Sequence[Message], *, for_answer: bool
) -> str | None:
    """What the template writes behind the mark, or None if it writes no mark or refuses."""
    try:
        _, found, rest = template.render(messages, for_answer=for_answer).rpartition(mark)
    except BadChat:
        return None
    return rest if found else None


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None if there is none."""
    if len(ids) == len(others) and list(ids) == list(others):
        return None
    pairs = zip(ids, others, strict=False)
    shorter = min(len(ids), len(others))
    return next((index for index, (mine, other) in enumerate(pairs) if mine != other), shorter)


def drift_of(difference: int | None, *, is_fork: bool) -> Drift:
    """The class of a prompt whose first difference is ``difference``."""
    if is_fork:
        return Drift.FORKED
    return Drift.CLEAN if difference is None else Drift.REALIGNED
