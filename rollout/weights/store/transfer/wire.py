"""Messages between store processes: lengths, a JSON object, then bytes.

Always true: lengths come first and are bounded; no received data is executed or unpickled; every
wait ends at the socket's timeout.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from engines.tensors.fingerprint import Buffer
from rollout.core.errors import WeightsUnavailable

_HEAD = struct.Struct("<IQ")
_MAX_HEAD = 1 << 20
_MAX_BODY = 1 << 40
_MAX_IN_MEMORY = 1 << 30


def send(connection: socket.socket, fields: Mapping[str, Any], body: Buffer = b"") -> None:
    announce(connection, fields, len(body))
    if len(body):
        connection.sendall(body)


def announce(connection: socket.socket, fields: Mapping[str, Any], num_bytes: int) -> None:
    """Send the start of a message; the caller sends its body."""
    text = json.dumps(fields).encode()
    connection.sendall(_HEAD.pack(len(text), num_bytes) + text)


def receive(connection: socket.socket) -> tuple[dict[str, Any], int] | None:
    """The object of a message and the length of its body; None if the connection was closed.

    Raises:
        WeightsUnavailable: it is not a valid message.
    """
    head = _exactly(connection, _HEAD.size, may_end=True)
    if not head:
        return None
    num_head_bytes, num_bytes = _HEAD.unpack(head)
    if num_head_bytes > _MAX_HEAD or num_bytes > _MAX_BODY:
        raise WeightsUnavailable(f"a message of {num_head_bytes} + {num_bytes} bytes is not valid")
    fields = json.loads(_exactly(connection, num_head_bytes))
    return fields, num_bytes


def receive_body(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive a body into memory."""
    if num_bytes > _MAX_IN_MEMORY:
        raise WeightsUnavailable(
            f"a body of {num_bytes} bytes is too long; at most {_MAX_IN_MEMORY}"
        )
    return _exactly(connection, num_bytes)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Receive a body directly into its place."""
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
