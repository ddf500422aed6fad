"""The text of ids that come one behind another, with the marks that a form gives a meaning.

Always true: the texts and marks, joined, do not depend on where the ids were cut, but for where
one text ends and the next begins.  They take time in proportion to the ids, whatever these are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rollout.agents.model.call_forms import Mark

_HALF = "\N{REPLACEMENT CHARACTER}"
_MANY_IDS = 64

Decode = Callable[[Sequence[int]], str]
"""The text of ids, with special tokens."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a form in the texts of one tokenizer.

    Attributes:
        ids: those that are tokens of their own, by id.
        hidden: special tokens that are no marks and not in an answer's text.
        texts: the marks that are texts, or None for none.
        partial: their beginnings.
        longest: length of the longest of these.
    """

    ids: Mapping[int, str]
    hidden: frozenset[int]
    texts: re.Pattern[str] | None
    partial: frozenset[str]
    longest: int

    def num_open(self, text: str) -> int:
        """Characters at the end of a text with which a mark may begin."""
        lengths = range(min(self.longest, len(text)), 0, -1)
        return next((num for num in lengths if text[-num:] in self.partial), 0)


def marks_of(
    words: Sequence[str], id_of: Callable[[str], int | None], special: Mapping[int, str]
) -> Marks:
    """The marks with these words.

    Args:
        id_of: the id of an added token, or None for other texts.
        special: texts of the special tokens, by id.
    """
    ids = {token_id: word for word in words if (token_id := id_of(word)) is not None}
    texts = sorted(set(words) - set(ids.values()), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
    partial = frozenset(word[:num] for word in texts for num in range(1, len(word)))
    longest = max(map(len, partial), default=0)
    return Marks(ids, frozenset(special) - ids.keys(), pattern, partial, longest)


@dataclass(slots=True)
class ReplyText:
    """Reads the ids of one answer.

    Args:
        before: the last id before them; a tokenizer may write a token otherwise at the beginning.
    """

    decode: Decode
    marks: Marks
    before: Sequence[int] = ()
    num_ids: int = 0
    _ids: list[int] = field(init=False)
    _num_shown: int = 0
    _num_tried: int = 0
    _open: str = ""

    def __post_init__(self) -> None:
        self._begin(self.before[-1:])

    def feed(self, ids: Sequence[int]) -> Iterator[str]:
        """The texts and marks of the next ids, as far as they are certain."""
        marks, begin = self.marks, 0
        for at in [
            at
            for at, token_id in enumerate(ids)
            if token_id in marks.ids or token_id in marks.hidden
        ]:
            yield from self._plain(ids[begin:at])
            yield from self.rest()
            begin = at + 1
            if (word := marks.ids.get(ids[at])) is not None:
                mark = Mark(word)
                mark.num_ids = self.num_ids + begin
                yield mark
            self._begin([ids[at]])
        yield from self._plain(ids[begin:])
        self.num_ids += len(ids)

    def rest(self) -> Iterator[str]:
        """What was not certain; nothing follows it."""
        text = self.decode(self._ids)[self._num_shown :] if self._ids else ""
        self._begin(self._ids[-1:])
        yield from self._marked(text, is_last=True)

    def _begin(self, before: Sequence[int]) -> None:
        self._ids = list(before)
        self._num_shown = len(self.decode(self._ids)) if self._ids else 0
        self._num_tried = 0

    def _plain(self, ids: Sequence[int]) -> Iterator[str]:
        if not ids:
            return
        self._ids += ids
        num = len(self._ids)
        if num > _MANY_IDS and num < 2 * self._num_tried:
            return  # bytes of no character: they are not decoded again and again
        whole = self.decode(self._ids)
        text = whole.removesuffix(_HALF)  # of bytes that may begin a character it makes one
        new = text[self._num_shown :]
        if text is whole or len(text) == len(whole):
            self._begin(self._ids[-1:])
        else:
            self._num_shown = max(self._num_shown, len(text))
            self._num_tried = num
        yield from self._marked(new)

    def _marked(self, text: str, *, is_last: bool = False) -> Iterator[str]:
        texts = self.marks.texts
        if texts is None:
            if text:
                yield text
            return
        text, at = self._open + text, 0
        for found in texts.finditer(text):
            if found.start() > at:
                yield text[at : found.start()]
            yield Mark(found[0])
            at = found.end()
        num_open = 0 if is_last else self.marks.num_open(text[at:])
        end = len(text) - num_open
        self._open = text[end:]
        if end > at:
            yield text[at:end]


@dataclass(slots=True)
class StopStrings:
    """Holds back what a stop string of the client may cut off.

    Engines end the text before it, and have its ids all the same.
    """

    strings: Sequence[str]
    _held: list[str] = field(default_factory=list)
    _is_met: bool = False

    def feed(self, token: str) -> list[str]:
        """The tokens that are certain with this one."""
        if not self.strings:
            return [token]
        self._held.append(token)
        if self._is_met:
            return []
        text = "".join(self._held)
        met = [at for string in self.strings if (at := text.find(string)) >= 0]
        self._is_met = bool(met)
        at = min(met) if met else self._open_at(text)
        return self._until(at)

    def rest(self, matched: str | None) -> list[str]:
        """What was held back, up to the string that ended the answer."""
        text = "".join(self._held)
        at = text.rfind(matched) if matched else -1
        return self._until(len(text) if at < 0 else at)

    def _open_at(self, text: str) -> int:
        """Where the text may begin to be a stop string."""
        longest = max(map(len, self.strings))
        for at in range(max(0, len(text) - longest + 1), len(text)):
            if any(string.startswith(text[at:]) for string in self.strings):
                return at
        return len(text)

    def _until(self, num: int) -> list[str]:
        """The held tokens up to a number of characters; a mark is not cut."""
        certain: list[str] = []
        while self._held and num > 0:
            token = self._held[0]
            if len(token) > num:
                if isinstance(token, Mark):
                    break
                certain.append(token[:num])
                self._held[0] = token[num:]
            else:
                certain.append(self._held.pop(0))
            num -= len(token)
        return certain
