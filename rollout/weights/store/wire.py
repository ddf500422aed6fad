"""What goes over a connection between store processes: a JSON line's worth of words, then bytes.

Always true: lengths come first and are bounded; nothing that arrives is executed or unpickled;
every wait ends at the socket's timeout.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from rollout.errors import WeightsUnavailable
from rollout.weights.fingerprint import Buffer

_HEAD = struct.Struct("<IQ")
_MAX_WORDS = 1 << 20
_MAX_BODY = 1 << 40


def send(connection: socket.socket, words: Mapping[str, Any], body: Buffer = b"") -> None:
    """One message."""
    announce(connection, words, len(body))
    if len(body):
        connection.sendall(body)


def announce(connection: socket.socket, words: Mapping[str, Any], num_bytes: int) -> None:
    """The beginning of a message whose body the caller sends."""
    text = json.dumps(words).encode()
    connection.sendall(_HEAD.pack(len(text), num_bytes) + text)


def receive(connection: socket.socket) -> tuple[dict[str, Any], int] | None:
    """The words of a message and how many bytes follow; None when the other side has closed.

    Raises:
        WeightsUnavailable: what came is no message.
    """
    head = _exactly(connection, _HEAD.size, may_end=True)
    if not head:
        return None
    num_words, num_bytes = _HEAD.unpack(head)
    if num_words > _MAX_WORDS or num_bytes > _MAX_BODY:
        raise WeightsUnavailable(f"a message of {num_words} + {num_bytes} bytes is not one of ours")
    words = json.loads(_exactly(connection, num_words))
    return words, num_bytes


def receive_body(connection: socket.socket, num_bytes: int, *, at_most: int = 1 << 30) -> bytes:
    """The bytes that follow, in memory."""
    if num_bytes > at_most:
        raise WeightsUnavailable(f"a body of {num_bytes} bytes is too long; at most {at_most}")
    return _exactly(connection, num_bytes)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """The bytes that follow, straight into their place.

    Raises:
        ConnectionError: they end too early.
    """
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError(f"the connection ended, {len(view)} bytes are missing")
        view = view[count:]


def _exactly(connection: socket.socket, num_bytes: int, *, may_end: bool = False) -> bytes:
    data = bytearray(num_bytes)
    view = memoryview(data)
    if may_end:
        count = connection.recv_into(view)
        if not count:
            return b""
        view = view[count:]
    receive_into(connection, view)
    return bytes(data)
