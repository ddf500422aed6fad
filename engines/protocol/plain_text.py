"""Errors, values and sizes as text, for messages and tables."""

from __future__ import annotations

from collections.abc import Sequence


def describe(error: BaseException, *, with_type: bool = False) -> str:
    """An error as text; its type where it has no text, as with a bare ``TimeoutError``."""
    text, kind = str(error), type(error).__name__
    if not text:
        return kind
    return f"{kind}: {text}" if with_type else text


def first_line(text: object) -> str:
    """The first line of a text, or of an error's."""
    return str(text).strip().partition("\n")[0]


def shortened(text: str, most: int) -> str:
    """A text, cut to so many characters; its beginning stays."""
    return text if len(text) <= most else text[: most - 3] + "..."


def one_line(text: str, most: int = 80) -> str:
    """A text that others have chosen, for a log line: cut, with its control characters escaped."""
    begin = text[: most + 1]
    if not begin.isprintable():
        begin = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in begin)
    return shortened(begin, most)


def value_text(value: object, most: int = 80) -> str:
    """A value as it is written in Python, cut to so many characters."""
    return shortened(repr(value), most)


def size_text(num_bytes: float | None) -> str:
    """Bytes in the unit that reads best: ``512 B``, ``12 KiB``, ``196 MiB``, ``1.50 GiB``; ``-``
    where they are unknown."""
    if num_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def holder_text(name: str, num_bytes: int | None) -> str:
    """What a program holds on a GPU; the driver may not say how much."""
    return f"{name} holds {'memory' if num_bytes is None else size_text(num_bytes)}"


def differing_text(names: Sequence[str], most: int = 8) -> str:
    """What an engine says of weights that are not those of its snapshot."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"weights differ from the snapshot: {', '.join(names[:most])}{more}"
