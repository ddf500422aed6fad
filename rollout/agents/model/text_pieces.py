"""Where a text is cut, so that the ids of its pieces, joined, are those of the whole (pure).

A tokenizer divides a text at its added tokens before it does anything else, and each part alone
gives its ids.  Always true: a text is cut only before an added token that it has there whatever
stands around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken

_PIECE_CHARACTERS = 1 << 14
_SEARCHED_CHARACTERS = 1 << 16
_LETTER_OR_SPACE = re.compile(r"[\w\s]")


@dataclass(frozen=True, slots=True)
class Borders:
    """The added tokens before which a text may be cut.

    Attributes:
        tokens: any of them.
        longest: length of the longest one.
    """

    tokens: re.Pattern[str]
    longest: int

    def is_at(self, text: str, index: int) -> bool:
        return self.tokens.match(text, index) is not None

    def first(self, text: str, begin: int) -> int:
        """Index of the first one that begins at ``begin`` or behind; else the text's end.

        A search holds the interpreter's lock, so one takes a part of the text.
        """
        for at in range(begin, len(text), _SEARCHED_CHARACTERS):
            if found := self.tokens.search(text, at, at + _SEARCHED_CHARACTERS + self.longest):
                return found.start()
        return len(text)


def borders_of(added: Iterable[AddedToken]) -> Borders | None:
    """The borders of a tokenizer with these tokens, or None if it has none.

    No border is a token that is searched in the normalized text; one that takes the space before it
    or is found by what stands beside it; and one that can be a part of another, or begin within it.
    A token before a border must not find a letter or a space there, for it may depend on that.
    """
    early = [token for token in added if token.content and not token.normalized]
    contents = {token.content for token in early}
    joined = "\0".join(contents)
    tails = {content[at:] for content in contents for at in range(1, len(content))}

    def is_border(token: AddedToken) -> bool:
        content = token.content
        return not (
            token.lstrip
            or token.single_word
            or _LETTER_OR_SPACE.match(content)
            or joined.count(content) > 1
            or any(content[:num] in tails for num in range(1, len(content) + 1))
        )

    found = sorted({token.content for token in early if is_border(token)})
    if not found:
        return None
    return Borders(re.compile("|".join(map(re.escape, found))), max(map(len, found)))


def pieces(text: str, borders: Borders | None, begin: int = 0) -> Iterator[str]:
    """The text from a border on, in pieces: as short as borders allow, but not tiny."""
    while begin < len(text):
        end = len(text)
        if borders is not None:
            end = borders.first(text, begin + _PIECE_CHARACTERS)
        yield text[begin:end]
        begin = end
