"""Fingerprints of weights, to find tensors that should be equal and are not.

Always true:
- a fingerprint covers a tensor's name, dtype, shape and contents; two tensors that swapped their
  contents, or bytes read as another dtype, have other fingerprints;
- its text begins with the method, ``xxh3:...`` from the bytes or ``sums:...`` from sums that
  a GPU can make, and equal contents give equal text on every machine;
- fingerprints made in different ways are never compared: equal tensors would count as different.

They catch accidents, not an adversary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache

from xxhash import xxh3_128

BYTES, SUMS = "xxh3", "sums"
"""The methods, as the text of a fingerprint begins."""

Buffer = bytes | bytearray | memoryview
Hasher = xxh3_128
"""A hash that is fed piece by piece; see ``start``."""


def start(name: str, dtype: str, shape: Sequence[int]) -> Hasher:
    """A hash of the tensor's name, dtype and shape: feed it the tensor's bytes in order, in
    pieces of any size, and pass it to ``host_fingerprint_of``."""
    return start_with(head_of(name, dtype, tuple(shape)))


def start_with(head: bytes) -> Hasher:
    """The same, from the bytes that ``head_of`` returned."""
    return xxh3_128(head)


@lru_cache(maxsize=1 << 16)
def head_of(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """The bytes that are hashed before the contents."""
    # Its length first: no name can then look like a shorter one followed by contents.
    head = json.dumps([name, dtype, list(shape)]).encode()
    return len(head).to_bytes(8, "little") + head


def host_fingerprint_of(hasher: Hasher) -> str:
    """The fingerprint of what ``hasher`` was fed."""
    return f"{BYTES}:{hasher.hexdigest()}"


def texts_of(digests: bytes) -> list[str]:
    """The same, of digests that were made elsewhere: 16 bytes each, as XXH3 writes them."""
    text = digests.hex()
    return [f"{BYTES}:{text[begin : begin + 32]}" for begin in range(0, len(text), 32)]


def host_fingerprint(name: str, dtype: str, shape: Sequence[int], *pieces: Buffer) -> str:
    """Fingerprint of a tensor whose contiguous bytes are ``pieces``, one after the other.

    Args:
        dtype: in torch's words, for example ``bfloat16``.
    """
    hasher = start(name, dtype, shape)
    for piece in pieces:
        hasher.update(piece)
    return host_fingerprint_of(hasher)


def sums_fingerprint(
    name: str, dtype: str, shape: Sequence[int], sums: Sequence[tuple[str, Buffer]]
) -> str:
    """Fingerprint of a tensor from its small ``sums``, each with its name."""
    hasher = start(name, dtype, shape)
    for part, data in sums:
        hasher.update(f"{part} {memoryview(data).nbytes} ".encode())
        hasher.update(data)
    return f"{SUMS}:{hasher.hexdigest()}"


def whole_fingerprint(fingerprints: Mapping[str, str]) -> str:
    """One fingerprint of many tensors, by name; in which order they come does not matter.

    Raises:
        ValueError: they were not all made in the same way.
    """
    way = way_of(fingerprints)
    return f"{way}:{xxh3_128(json.dumps(sorted(fingerprints.items())).encode()).hexdigest()}"


def way_of(fingerprints: Mapping[str, str]) -> str:
    """The method of these: ``xxh3`` or ``sums``, or empty for none.

    Raises:
        ValueError: they were not all made in the same way, or are no fingerprints.
    """
    ways: dict[str, str] = {}
    for name, text in fingerprints.items():
        way, separator, _ = text.partition(":")
        if not separator or way not in (BYTES, SUMS):
            raise ValueError(f"{text!r} of tensor {name!r} is no fingerprint")
        ways.setdefault(way, name)
    if len(ways) > 1:
        methods = ", ".join(f"{name!r} by {way}" for way, name in ways.items())
        raise ValueError(f"fingerprints made in different ways cannot be compared: {methods}")
    return next(iter(ways), "")
