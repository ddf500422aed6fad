"""One reader of foreign bytes, and what must be true of it for every input.

Always true: an input is accepted, or refused by an error that the reader documents; it takes at
most ``MOST_CPU_S`` of the processor; it makes at most ``Reader.growth`` bytes at one time; where
bytes arrive in parts, the result does not depend on where they were cut.
"""

from __future__ import annotations

import random
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

MOST_BYTES = 1 << 16
"""Of an input."""
MOST_CPU_S = 0.05
"""Of one input of at most ``MOST_BYTES``, not instrumented."""
_BASE_BYTES = 1 << 20
_TIMES = 3  # a garbage collection may be in one of them
_MOST_CUT_EVERYWHERE = 1 << 10


class Refused(Exception):
    """A reader that answers with a value has refused: it gave None, an error reply, or the like."""


class Violation(AssertionError):
    """An input for which one of the rules is not true."""


ANY = object()
"""The result of an input that may depend on how it was cut."""


def times(factor: int, base: int = _BASE_BYTES) -> Callable[[int], int]:
    """A bound of memory: so many bytes for each byte of the input, and a base."""
    return lambda num_bytes: base + factor * num_bytes


_OF_JSON = times(128)


@dataclass(frozen=True, slots=True)
class Reader:
    """One reader.

    Attributes:
        read: reads an input that came in these parts.
        refusals: the errors that it documents.
        seeds: inputs of which it accepts at least one, and refuses at least one.
        growth: the most bytes of Python's that it has at one time, by the length of the input.
        is_split: its input arrives in parts; the result does not depend on them.
        needs: packages without which it cannot be called.
    """

    name: str
    read: Callable[[Sequence[bytes]], object]
    refusals: tuple[type[Exception], ...]
    seeds: Callable[[], Iterable[bytes]]
    growth: Callable[[int], int] = _OF_JSON
    is_split: bool = False
    needs: tuple[str, ...] = ()


def numbered(parts: Sequence[bytes], num: int) -> tuple[int, list[bytes]]:
    """A number below ``num``, which is the first byte of the input, and the parts without it."""
    rest = [part for part in parts if part]
    if not rest:
        return 0, []
    return rest[0][0] % num, [rest[0][1:], *rest[1:]]


def whole(read: Callable[[bytes], object]) -> Callable[[Sequence[bytes]], object]:
    """A reader of inputs that arrive whole."""
    return lambda parts: read(b"".join(parts))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reader did with an input.

    Attributes:
        result: what it made, or the type of its refusal.
    """

    is_accepted: bool
    result: object


def outcome(reader: Reader, parts: Sequence[bytes]) -> Outcome:
    """What the reader does with an input.

    Raises:
        Violation: it raises an error that it does not document.
    """
    refusals: tuple[type[Exception], ...] = (Refused, *reader.refusals)
    try:
        return Outcome(True, reader.read(parts))
    except refusals as error:
        return Outcome(False, type(error).__name__)
    except Violation:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        kinds = ", ".join(kind.__name__ for kind in reader.refusals) or "none"
        raise Violation(
            f"{reader.name} raised {type(error).__name__}, and it documents {kinds}: {error!r:.300}"
        ) from error


def check(
    reader: Reader,
    data: bytes,
    *,
    most_cpu_s: float = MOST_CPU_S,
    memory: bool = True,
    splits: bool = True,
) -> Outcome:
    """Check all rules for one input.

    Args:
        memory: measure the memory too, which takes as long again.
        splits: cut it too.

    Raises:
        Violation: one is not true.
    """
    found, cpu_s = _timed(reader, data)
    for _ in range(_TIMES):
        if cpu_s <= most_cpu_s:
            break
        found, again_s = _timed(reader, data)
        cpu_s = min(cpu_s, again_s)
    else:
        raise Violation(f"{reader.name} took {cpu_s * 1e3:.0f} ms for {len(data)} bytes")
    if reader.is_split and splits:
        for parts in _cuts(data):
            other = outcome(reader, parts)
            if ANY not in (other.result, found.result) and other != found:
                sizes = list(map(len, parts))[:8]
                raise Violation(
                    f"{reader.name} reads {data!r:.200} cut as {sizes} as {other!r:.400}, and whole"
                    f" as {found!r:.400}"
                )
    if memory:
        _check_memory(reader, data)
    return found


def _timed(reader: Reader, data: bytes) -> tuple[Outcome, float]:
    began_s = time.thread_time()
    found = outcome(reader, [data])
    return found, time.thread_time() - began_s


def _check_memory(reader: Reader, data: bytes) -> None:
    most = reader.growth(len(data))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        outcome(reader, [data])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if peak - before > most:
        raise Violation(
            f"{reader.name} made {peak - before} bytes of {len(data)}; its bound is {most}"
        )


def _cuts(data: bytes) -> Iterator[list[bytes]]:
    """Some ways to cut an input, always the same for the same one."""
    chance = random.Random(zlib.crc32(data))
    if len(data) <= _MOST_CUT_EVERYWHERE:
        yield [data[at : at + 1] for at in range(len(data))]
    for num in (1, 2, 5):
        places = sorted(chance.randint(0, len(data)) for _ in range(num))
        ends = [*places, len(data)]
        yield [data[begin:end] for begin, end in zip([0, *places], ends, strict=True)]


def mutations(data: bytes, num: int, others: Sequence[bytes] = ()) -> Iterator[bytes]:
    """Changed copies of an input, always the same for the same one.

    Args:
        others: inputs of which parts may get into it.
    """
    chance = random.Random(zlib.crc32(data) + 1)
    for _ in range(num):
        new = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            at = chance.randint(0, len(new))
            end = min(len(new), at + chance.randint(1, 8))
            match chance.randrange(5):
                case 0:
                    new[at:end] = chance.randbytes(chance.randint(0, 4))
                case 1:
                    del new[at:end]
                case 2:
                    new[at:at] = new[at:end] * chance.randint(1, 32)
                case 3:
                    new[at:end] = chance.choice(_AWKWARD)
                case _:
                    other = chance.choice(others or (data,))
                    begin = chance.randint(0, len(other))
                    new[at:end] = other[begin : begin + chance.randint(1, 64)]
        yield bytes(new[:MOST_BYTES])


_AWKWARD = (
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"Infinity",
    b'""',
    b"[]",
    b"{}",
    b"[[[[",
    b"true",
    b"0.5",
    b'"\\ud800"',
    b"9" * 30,
    b"\xff\xff\xff\xff",
    b"\0" * 8,
    b"\r\n\r\n",
    b"\n\n",
)
