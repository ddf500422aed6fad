"""The values in a pickle, read without ``pickle``, which calls what a pickle names.

Always true: a name stands for what the caller's table has for it, and nothing is imported; only
what that table has can be called or filled; bytes are views of the pickle; keys are text.  So what
is made takes at most some hundred bytes for each byte that is read, and nothing in it runs.

The opcodes of protocols 2 to 5 are read, as far as numbers, text, bytes, lists, tuples, dicts and
objects need them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from engines.protocol.plain_text import value_text

Find = Callable[[str, str], Any]
"""What a module and a name stand for; ValueError if they stand for nothing."""

# A bucket of a hundred thousand tensors has half as many.
MAX_STEPS = 10_000_000
_MAX_NAME = 200


def read_pickle(
    data: memoryview, find: Find, start: int = 0, stored: Callable[[Any], Any] | None = None
) -> tuple[Any, int]:
    """The value of a pickle, and where the pickle ends.

    Args:
        data: bytes with the pickle at ``start``; more may follow.
        stored: makes the value of a persistent id.

    Raises:
        ValueError: it is no pickle of such values, or it names something else.
    """
    machine = _Machine(data, find, start, stored)
    try:
        return machine.run(), machine.at
    except ValueError:
        raise
    except Exception as error:  # the callables of a table can raise anything
        raise ValueError(f"a damaged pickle: {value_text(error)}") from error


class _Machine:
    def __init__(
        self, data: memoryview, find: Find, start: int, stored: Callable[[Any], Any] | None
    ) -> None:
        self.at = start
        self.stack: list[Any] = []
        self._data = data
        self._find = find
        self._stored = stored
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(MAX_STEPS):
            code = self.number(1)
            if code == _STOP:
                return self.stack.pop()
            step = _STEPS.get(code)
            if step is None:
                raise ValueError(f"a pickle of weights has no opcode {code:#04x}")
            step(self)
        raise ValueError(f"a pickle of weights has at most {MAX_STEPS} steps")

    # -- reading --------------------------------------------------------------------------------

    def take(self, num_bytes: int) -> memoryview:
        begin, self.at = self.at, self.at + num_bytes
        if self.at > len(self._data):
            raise ValueError("a pickle ends within a value")
        return self._data[begin : self.at]

    def number(self, num_bytes: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(num_bytes), "little", signed=signed)

    def text(self, num_bytes: int) -> str:
        return str(self.take(num_bytes), "utf-8")

    def line(self) -> str:
        ahead = bytes(self._data[self.at : self.at + _MAX_NAME])
        line, end, _ = ahead.partition(b"\n")
        self.take(len(line) + len(end))
        return line.decode()

    # -- the stack ------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self._marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        begin = self._marks.pop()
        values = self.stack[begin:]
        del self.stack[begin:]
        return values

    def put(self, index: int | None = None) -> None:
        self._memo[len(self._memo) if index is None else index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.push(self._memo[index])

    def pack(self, length: int) -> None:
        values = tuple(self.stack[-length:])
        if len(values) != length:
            raise ValueError("a pickle takes more values than it has")
        self.stack[-length:] = [values]

    def extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("a pickle appends to what is no list")
        self.stack[-1].extend(values)

    def fill(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not dict:
            raise ValueError("a pickle sets items of what is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # Hashing a deep tuple overflows the stack of the process.
            if type(key) is not str:
                raise ValueError("a pickle has a key that is no text")
            self.stack[-1][key] = value

    # -- objects --------------------------------------------------------------------------------

    def find(self, module: str, name: str) -> None:
        self.push(self._find(module, name))

    def find_on_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(module) is not str or type(name) is not str:
            raise ValueError("a pickle has a name that is no text")
        self.find(module, name)

    def call(self) -> None:
        arguments, known = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or not callable(known):
            what = value_text(known) if isinstance(known, str) else f"a {type(known).__name__}"
            raise ValueError(f"a pickle of weights calls {what}, which makes no tensor")
        self.push(known(*arguments))

    def create(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or not isinstance(kind, type):
            raise ValueError(f"a pickle makes an object of a {type(kind).__name__}")
        self.push(kind.__new__(kind, *arguments))

    def build(self) -> None:
        state = self.stack.pop()
        set_state = getattr(type(self.stack[-1]), "__setstate__", None)
        if set_state is None:
            raise ValueError(f"a pickle changes a {type(self.stack[-1]).__name__}")
        set_state(self.stack[-1], state)

    def load_stored(self) -> None:
        if self._stored is None:
            raise ValueError("a pickle of weights has no persistent ids")
        self.push(self._stored(self.stack.pop()))


_STOP = ord(".")
_STEPS: Mapping[int, Callable[[_Machine], object]] = {
    0x80: lambda it: it.take(1),  # PROTO
    0x95: lambda it: it.take(8),  # FRAME
    ord("N"): lambda it: it.push(None),
    0x88: lambda it: it.push(True),
    0x89: lambda it: it.push(False),
    ord("K"): lambda it: it.push(it.number(1)),
    ord("M"): lambda it: it.push(it.number(2)),
    ord("J"): lambda it: it.push(it.number(4, signed=True)),
    0x8A: lambda it: it.push(it.number(it.number(1), signed=True)),  # LONG1
    ord("G"): lambda it: it.push(struct.unpack(">d", it.take(8))[0]),
    0x8C: lambda it: it.push(it.text(it.number(1))),  # SHORT_BINUNICODE
    ord("X"): lambda it: it.push(it.text(it.number(4))),
    ord("C"): lambda it: it.push(it.take(it.number(1))),
    ord("B"): lambda it: it.push(it.take(it.number(4))),
    0x8E: lambda it: it.push(it.take(it.number(8))),  # BINBYTES8
    0x96: lambda it: it.push(it.take(it.number(8))),  # BYTEARRAY8
    ord("]"): lambda it: it.push([]),
    ord("}"): lambda it: it.push({}),
    ord(")"): lambda it: it.push(()),
    ord("("): _Machine.mark,
    ord("a"): lambda it: it.extend([it.stack.pop()]),
    ord("e"): lambda it: it.extend(it.since_mark()),
    ord("s"): lambda it: it.fill([it.stack.pop(-2), it.stack.pop()]),
    ord("u"): lambda it: it.fill(it.since_mark()),
    ord("t"): lambda it: it.push(tuple(it.since_mark())),
    0x85: lambda it: it.pack(1),
    0x86: lambda it: it.pack(2),
    0x87: lambda it: it.pack(3),
    0x94: _Machine.put,  # MEMOIZE
    ord("q"): lambda it: it.put(it.number(1)),
    ord("r"): lambda it: it.put(it.number(4)),
    ord("h"): lambda it: it.get(it.number(1)),
    ord("j"): lambda it: it.get(it.number(4)),
    ord("c"): lambda it: it.find(it.line(), it.line()),
    0x93: _Machine.find_on_stack,
    ord("R"): _Machine.call,
    0x81: _Machine.create,  # NEWOBJ
    ord("b"): _Machine.build,
    ord("Q"): _Machine.load_stored,
}
