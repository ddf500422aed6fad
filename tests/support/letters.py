"""A tokenizer with a token for each character, and one for each of some words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollout.agents.model.answer_reader import AnswerReader
from rollout.agents.model.call_forms import BY_NAME, THINK
from rollout.agents.model.reply_text import marks_of

_FIRST = 0x110000


class Letters:
    """Ids below ``_FIRST`` are characters."""

    def __init__(self, words: Iterable[str] = (), special: Sequence[str] = ()) -> None:
        self.words = list(dict.fromkeys([*words, *special]))
        self.special = {_FIRST + self.words.index(word): word for word in special}
        longest_first = sorted(self.words, key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL)

    def encode(self, text: str) -> list[int]:
        found = self._pattern.findall(text)
        return [self._id(one) for one in found]

    def _id(self, one: str) -> int:
        return _FIRST + self.words.index(one) if one in self.words else ord(one)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[one - _FIRST] if one >= _FIRST else chr(one) for one in ids)

    def reader(self, form: str, *, thinks: bool = True) -> AnswerReader:
        """Reads answers in a form; marks are tokens where they are words."""
        found, thinking = BY_NAME[form], THINK if thinks and form != "harmony" else None
        words = (*found.all_marks, *(thinking or ()))
        ids = {word: _FIRST + index for index, word in enumerate(self.words)}
        return AnswerReader(found, thinking, marks_of(words, ids.get, self.special), self.decode)
