"""Weights from one engine to another, as the bytes of one safetensors file over HTTP.

Always true: an engine that gives reads its weights on the generation thread, piece by piece, so
that they are never read while they change or are released: then it breaks off; one that takes has
checked the names, shapes and dtypes of all before its first byte changes, and must have got every
byte that was announced.  Whether they are the right ones is for its owner to verify.
"""

from __future__ import annotations

import http.client
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

import orjson
import torch

from engines.embedded.engine import Engine
from engines.embedded.errors import Conflict, Invalid
from engines.embedded.fingerprint import as_bytes
from engines.embedded.headers import DTYPES, Contents, Piece, read_header
from engines.embedded.weights import Weights
from engines.protocol import Endpoint

_PIECE_BYTES = 4 << 20
# Of silence, after which a peer counts as gone.
_TIMEOUT_S = 20.0
_COMMAND = "weights_content"

Part = tuple[str, int, int]
"""Name of a tensor, first byte and the one after the last."""


def describe(weights: Weights) -> tuple[bytes, int]:
    """What comes before the tensors, and the length of all."""
    words = {dtype: word for word, dtype in DTYPES.items()}
    entries: dict[str, Any] = {}
    position = 0
    for name, tensor in weights.own().items():
        end = position + tensor.nbytes
        entries[name] = {
            "dtype": words[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    header = orjson.dumps(entries)
    return struct.pack("<Q", len(header)) + header, 8 + len(header) + position


async def give(engine: Engine, head: bytes) -> AsyncIterator[bytes]:
    """All bytes.

    Raises:
        Conflict: the weights changed or were released meanwhile.
    """
    version = engine.weight_version

    def read(parts: Sequence[Part]) -> bytes:
        engine.gate.require_weights(_COMMAND)
        if engine.gate.is_session_open or engine.weight_version != version:
            raise Conflict(f"{_COMMAND}: the weights are being changed")
        return b"".join(_content(engine.weights, part) for part in parts)

    yield head
    for parts in _parts(engine.weights):
        yield await engine.run(partial(read, parts))


def _parts(weights: Weights) -> Iterator[list[Part]]:
    """Some megabytes each: a request may be answered in between."""
    parts: list[Part] = []
    size = 0
    for name, tensor in weights.own().items():
        for begin in range(0, tensor.nbytes, _PIECE_BYTES):
            end = min(begin + _PIECE_BYTES, tensor.nbytes)
            if parts and size + end - begin > _PIECE_BYTES:
                yield parts
                parts, size = [], 0
            parts.append((name, begin, end))
            size += end - begin
    if parts:
        yield parts


def _content(weights: Weights, part: Part) -> memoryview:
    name, begin, end = part
    array: Any = as_bytes(weights.find(name))[begin:end].cpu().numpy()
    return memoryview(array)


def take(weights: Weights, peer: Endpoint, timeout_s: float = _TIMEOUT_S) -> None:
    """Overwrite the model with what ``peer`` gives."""
    has_begun = False
    connection = http.client.HTTPConnection(peer.host, peer.port, timeout=timeout_s)
    try:
        connection.request("GET", f"/{_COMMAND}")
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise OSError(f"it answered {response.status}: {response.read(300)!r}")
        pieces = _announced(response)
        weights.check((one.name, one.shape, one.dtype) for one in pieces)
        if missing := weights.own().keys() - {one.name for one in pieces}:
            raise ValueError(f"it has no {min(missing)!r}")
        has_begun = True
        for piece in sorted(pieces, key=lambda one: one.offset):
            _receive(response, weights, piece)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        state = "the weights are now a mixture" if has_begun else "nothing was updated"
        raise Invalid(f"no weights from {peer.url}: {error!r}; {state}") from error
    finally:
        connection.close()


def _announced(response: http.client.HTTPResponse) -> list[Piece]:
    header = read_header(
        lambda num_bytes, _: bytes(_read(response, memoryview(bytearray(num_bytes))))
    )
    return list(Contents(header, int(response.headers["content-length"])).pieces())


def _receive(response: http.client.HTTPResponse, weights: Weights, piece: Piece) -> None:
    mine = weights.find(piece.name)
    is_same = mine.dtype == piece.dtype and mine.device.type == "cpu" and mine.is_contiguous()
    target = mine if is_same else torch.empty(piece.shape, dtype=piece.dtype)
    array: Any = as_bytes(target).numpy()
    _read(response, memoryview(array))
    if not is_same:
        mine.copy_(target)


def _read(response: http.client.HTTPResponse, into: memoryview) -> memoryview:
    done = 0
    while done < len(into):
        count = response.readinto(into[done:])
        if not count:
            raise OSError(f"it broke off after {done} of {len(into)} bytes of a tensor")
        done += count
    return into
