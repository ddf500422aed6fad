"""Load tensors from a checkpoint and verify their fingerprints in the same pass.

Always true: a tensor whose fingerprint differs from the checkpoint's list fails the load, and the
error names it; a tensor without a fingerprint, or a fingerprint without a tensor, fails the load
before anything is changed.

Hashing afterwards would read memory once more; a piece that was just copied is still in the
core's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import orjson

from engines.embedded.memory.batched_copy import at, read_all
from engines.embedded.weights.model_weights import Location
from engines.protocol import FINGERPRINTS
from engines.tensors import bulk_copy
from engines.tensors.file_mapping import FileMapping
from engines.tensors.fingerprint import head_of, host_fingerprint_of, start
from engines.tensors.torch_fingerprint import dtype_name

# Fits in a core's own cache.
_PIECE_BYTES = 512 << 10

Placed = tuple[str, Location, int]
"""Name of a tensor, its location in memory, and its offset in the file."""


class LoadVerifier:
    """Loads tensors of one checkpoint and verifies them against its fingerprints."""

    def __init__(self, fingerprints: Mapping[str, str]) -> None:
        self._fingerprints = fingerprints

    def check_names(self, names: Iterable[str]) -> None:
        """Check that the checkpoint has exactly these tensors.

        Raises:
            ValueError: one has no fingerprint, or a fingerprint has no tensor.
        """
        names = set(names)
        if without := names - self._fingerprints.keys():
            raise ValueError(f"{min(without)!r} has no fingerprint")
        if missing := self._fingerprints.keys() - names:
            raise ValueError(f"there is no {min(missing)!r}")

    def read(self, descriptor: int, batch: Sequence[Placed]) -> None:
        """Read each tensor to its location and verify it there.

        Raises:
            OSError: the file is too short.
            ValueError: the fingerprint of a tensor differs.
        """
        for name, location, offset in batch:
            hasher = start(name, dtype_name(location.dtype), location.shape)
            into = at(location.address, location.num_bytes)
            for begin in range(0, location.num_bytes, _PIECE_BYTES):
                piece = into[begin : begin + _PIECE_BYTES]
                read_all(descriptor, piece, offset + begin)
                hasher.update(piece)
            self._check(name, host_fingerprint_of(hasher))

    def copy(self, contents: FileMapping, batch: Sequence[Placed]) -> None:
        """The same from a mapped file that contains the whole batch.

        Raises:
            ValueError: the fingerprint of a tensor differs.
        """
        found = bulk_copy.copy_and_hash(
            [
                head_of(name, dtype_name(location.dtype), tuple(location.shape))
                for name, location, _ in batch
            ],
            [location.address for _, location, _ in batch],
            [contents.address + offset for _, _, offset in batch],
            [location.num_bytes for _, location, _ in batch],
        )
        for (name, _, _), fingerprint in zip(batch, found, strict=True):
            self._check(name, fingerprint)

    def _check(self, name: str, fingerprint: str) -> None:
        if fingerprint != self._fingerprints[name]:
            raise ValueError(f"{name!r} is damaged: {FINGERPRINTS} has another fingerprint")


def read_verifier(path: Path) -> LoadVerifier | None:
    """The verifier of the checkpoint in this folder, or None if it has no fingerprints.

    Raises:
        ValueError: the fingerprint file is invalid.
    """
    try:
        found = orjson.loads((path / FINGERPRINTS).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"{FINGERPRINTS} is not names and fingerprints")
    return LoadVerifier(found)
