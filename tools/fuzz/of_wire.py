"""Readers of what comes over a run's own connections: greetings, frames, messages, records."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from engines.tensors.fingerprint import host_fingerprint
from rollout.core import VERSION, wire
from rollout.core.errors import RankFailure, RolloutError, WeightsUnavailable
from rollout.weights.format.manifest import TensorSpec
from rollout.weights.ranks import messages
from rollout.weights.store.layout import record
from rollout.weights.store.layout.commit import Write
from rollout.weights.store.layout.placement import Unit
from tools.fuzz.reader import Reader, times, whole

_TOKEN, _NONCE = "token", "0" * 32
_MOST_BODY = 1 << 20


class _Socket:
    """The other side has sent these parts, and closed."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = [part for part in parts if part]
        self.sent = b""

    def settimeout(self, seconds: float | None) -> None: ...
    def setsockopt(self, *option: Any) -> None: ...
    def close(self) -> None: ...
    def sendall(self, data: bytes | memoryview) -> None:
        self.sent += data

    def recv_into(self, view: memoryview, num_bytes: int = 0, flags: int = 0) -> int:
        if not self._parts:
            return 0
        part, rest = self._parts[0][: len(view)], self._parts[0][len(view) :]
        self._parts[:1] = [rest] if rest else []
        view[: len(part)] = part
        return len(part)


def _connection(parts: Sequence[bytes]) -> tuple[wire.Connection, _Socket]:
    opened = _Socket(parts)
    return wire.Connection(opened, 30.0), opened  # type: ignore[arg-type]


def _frame(head: Any, body: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return struct.pack("<IQ", len(text), len(body)) + text + body


def _digest(side: str, nonces: str) -> str:
    return hmac.new(_TOKEN.encode(), f"{side} {nonces}".encode(), hashlib.sha256).hexdigest()


def _greeted(parts: Sequence[bytes]) -> bool:
    """As a listener hears a caller."""
    connection, _ = _connection(parts)
    with patch("secrets.token_hex", return_value=_NONCE):
        connection._greet_caller(_TOKEN)
    return True


def _callers() -> Iterator[bytes]:
    digest = _digest("caller", f"{_NONCE} n")
    right = {"library": VERSION, "nonce": "n", "digest": digest}
    yield _frame(right)
    for name, value in (("library", "0"), ("digest", "é"), ("nonce", 5), ("digest", "0")):
        yield _frame({**right, name: value})
    yield struct.pack("<IQ", 1 << 31, 0)
    yield struct.pack("<IQ", 1024, 0) + b"[" * 1024
    yield b"GET / HTTP/1.1\r\n\r\n"


def _answered(parts: Sequence[bytes]) -> bool:
    """As a caller hears a listener."""
    connection, _ = _connection(parts)
    with patch("secrets.token_hex", return_value=_NONCE):
        connection._greet_listener(_TOKEN)
    return True


def _listeners() -> Iterator[bytes]:
    hello = _frame({"library": VERSION, "nonce": "n"})
    yield hello + _frame({"digest": _digest("listener", f"n {_NONCE}")})
    yield hello + _frame({"digest": "0"})
    yield hello + _frame({"refused": "no"})
    yield hello + _frame({"refused": 5})
    yield b"SSH-2.0-x\r\n" * 3


def _frames(parts: Sequence[bytes]) -> list[Any]:
    """All messages of a connection behind its greeting."""
    connection, opened = _connection(parts)
    found = []
    while opened._parts:
        head, num_bytes = connection.receive(may_idle=True)
        found.append((head, connection.body(num_bytes, _MOST_BODY)))
    if not found:
        raise ConnectionError("nothing came")
    return found


def _messages_of_wire() -> Iterator[bytes]:
    yield _frame({"call": "read", "write": [1, 2, "x"]}, b"body") + _frame({"end": True})
    yield _frame([1])
    yield struct.pack("<IQ", 5, 1 << 50) + b"hello"
    yield struct.pack("<IQ", 64 << 20, 0)
    yield struct.pack("<IQ", 2, 1 << 39) + b"{}"
    yield struct.pack("<IQ", 3000, 0) + b"[" * 3000


# -- messages of ranks --------------------------------------------------------------------------


def _rank_message(data: bytes) -> str:
    message = messages.decode(data.decode("utf-8", "replace"))
    if isinstance(message, messages.Failed | messages.Stop):
        assert isinstance(message.error.error(), RolloutError)
    return type(message).__name__


def _rank_messages() -> Iterator[bytes]:
    error = messages.ErrorText.of(RankFailure("it failed"))
    for one in (
        messages.Ready("k", 1, True, "node", "", 5),
        messages.Failed(error),
        messages.Stop(error),
        messages.Share("c", True, {"disk": {"path": "x"}}),
        messages.MakeBucket(3),
    ):
        yield messages.encode(one).encode()
    for field in ("__class__", "args", "__dict__", "rank", "with_traceback"):
        fields = {"error": {"kind": "RankFailure", "message": "m", "fields": {field: "x"}}}
        yield f"Stop {VERSION} {json.dumps(fields)}".encode()
    for kind in ("RolloutError", "ABC", "Mistake", "__builtins__", "annotations"):
        fields = {"error": {"kind": kind, "message": "m"}}
        yield f"Stop {VERSION} {json.dumps(fields)}".encode()
    yield b"Nothing 0 {}"
    yield f"Wait {VERSION} [".encode()


# -- records of the store -----------------------------------------------------------------------


def _record(data: bytes) -> Any:
    """A record whose digest is right: so that more than that is read of it."""
    digest = host_fingerprint("record", "uint8", (len(data),), data).encode()
    made = record.load(digest + b"\n" + data)
    return [made.num_bytes, *(len(made.segments_of(node)) for node in list(made.kept)[:4])]


def _records() -> Iterator[bytes]:
    units = (Unit("u", (TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "int8", ()))),)
    made = record.StoreRecord("run", Write(1, 2, "x"), units, {"n": (0,)}, 1 << 20, {"a": "f"})
    text = record.dump(made).partition(b"\n")[2]
    yield text
    values = json.loads(text)
    for name in values:
        for value in (
            None,
            [],
            {},
            -1,
            "x",
            [[1]],
            {"n": [5]},
            {"n": [-1]},
            [["u", [["a", "x", [1]]]]],
        ):
            yield json.dumps({**values, name: value}).encode()
    yield b"[" * 5000


def readers() -> Sequence[Reader]:
    """The readers of this module."""
    ended = (ConnectionError, TimeoutError)
    return (
        Reader("wire_caller", _greeted, ended, _callers, times(64, 1 << 17), is_split=True),
        Reader("wire_listener", _answered, ended, _listeners, times(64, 1 << 17), is_split=True),
        Reader(
            "wire_frames",
            _frames,
            ended,
            _messages_of_wire,
            times(64, _MOST_BODY + (4 << 20)),
            is_split=True,
        ),
        Reader("rank_message", whole(_rank_message), (RankFailure,), _rank_messages),
        Reader("store_record", whole(_record), (WeightsUnavailable,), _records),
    )
