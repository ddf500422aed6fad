"""Tensors read from a file and hashed where they then are.

Always true: what has another fingerprint than the checkpoint says is named, and fails the load; a
tensor without a fingerprint, or one that never comes, fails it before anything is changed.

Hashing all of it afterwards would read memory once more; a piece that was just copied is still in
the core's cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import orjson

from engines import bulk
from engines.embedded.fingerprint import dtype_name
from engines.embedded.headers import Piece
from engines.embedded.reading import read_all
from engines.embedded.weights import Home
from engines.fingerprint import Hasher, head_of, host_fingerprint_of, start
from engines.mapping import FileMapping
from engines.protocol import FINGERPRINTS

# What a core's own cache holds, with room for others.
_PIECE_BYTES = 512 << 10

Placed = tuple[str, Home, int]
"""Name of a tensor, where it belongs, and where it begins in the file."""


class Proofs:
    """The fingerprints of one checkpoint."""

    def __init__(self, fingerprints: Mapping[str, str]) -> None:
        self._fingerprints = fingerprints

    def check_names(self, names: Iterable[str]) -> None:
        """These are all tensors that there are.

        Raises:
            ValueError: one has no fingerprint, or a fingerprint has no tensor.
        """
        names = set(names)
        if without := names - self._fingerprints.keys():
            raise ValueError(f"{min(without)!r} has no fingerprint")
        if missing := self._fingerprints.keys() - names:
            raise ValueError(f"there is no {min(missing)!r}")

    def read(self, descriptor: int, batch: Sequence[Placed]) -> None:
        """Read each to its place and prove it there.

        Raises:
            OSError: the file ends before.
            ValueError: a tensor is not the right one.
        """
        for name, home, offset in batch:
            place = (ctypes.c_char * home.num_bytes).from_address(home.address)
            hasher = start(name, dtype_name(home.dtype), home.shape)
            self._read_one(name, hasher, descriptor, offset, memoryview(place).cast("B"))

    def copy(self, contents: FileMapping, batch: Sequence[Placed]) -> None:
        """The same out of a mapped file; the batch lies within it.

        Raises:
            ValueError: a tensor is not the right one.
        """
        found = bulk.copy_and_hash(
            [head_of(name, dtype_name(home.dtype), tuple(home.shape)) for name, home, _ in batch],
            [home.address for _, home, _ in batch],
            [contents.address + offset for _, _, offset in batch],
            [home.num_bytes for _, home, _ in batch],
        )
        for (name, _, _), fingerprint in zip(batch, found, strict=True):
            self._check(name, fingerprint)

    def read_apart(self, descriptor: int, piece: Piece, into: memoryview) -> None:
        """Read one tensor to somewhere else and prove it there.

        Raises:
            OSError: the file ends before.
            ValueError: it is not the right one.
        """
        hasher = start(piece.name, dtype_name(piece.dtype), piece.shape)
        self._read_one(piece.name, hasher, descriptor, piece.offset, into)

    def _read_one(
        self, name: str, hasher: Hasher, descriptor: int, offset: int, into: memoryview
    ) -> None:
        for begin in range(0, len(into), _PIECE_BYTES):
            piece = into[begin : begin + _PIECE_BYTES]
            read_all(descriptor, piece, offset + begin)
            hasher.update(piece)
        self._check(name, host_fingerprint_of(hasher))

    def _check(self, name: str, fingerprint: str) -> None:
        if fingerprint != self._fingerprints[name]:
            raise ValueError(f"{name!r} is damaged: {FINGERPRINTS} has another fingerprint")


def read_proofs(path: Path) -> Proofs | None:
    """Of the checkpoint in this folder; None if it has none.

    Raises:
        ValueError: the file is no such file.
    """
    try:
        found = orjson.loads((path / FINGERPRINTS).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise ValueError(f"{FINGERPRINTS} is not names and fingerprints")
    return Proofs(found)
