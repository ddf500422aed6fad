"""Tensors in the files of a push, compared with their fingerprints before engines load them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engines.tensors.fingerprint import BYTES, host_fingerprint_of, start
from engines.tensors.safetensors_header import PlacedTensor, read_header

_PIECE_BYTES = 256 << 10
# One core hashes at half of the memory bandwidth.
_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A tensor's bytes in a file that another process may shorten.  They are read, not mapped: then
    a shortened file is an error and does not kill the process."""

    descriptor: int
    offset: int
    num_bytes: int

    def pieces(self, num_bytes: int) -> Iterator[memoryview]:
        """Pieces of up to ``num_bytes``, in one buffer that stays in a core's cache.

        Raises:
            OSError: the file is shorter now.
        """
        buffer = memoryview(bytearray(min(num_bytes, self.num_bytes)))
        offset, end = self.offset, self.offset + self.num_bytes
        while offset < end:
            count = os.preadv(self.descriptor, [buffer[: end - offset]], offset)
            if not count:
                raise OSError("the pushed file was shortened while it was read")
            yield buffer[:count]
            offset += count


def why_damaged(folder: Path, fingerprints: Mapping[str, str]) -> str:
    """Why the files of a folder are not those that the trainer wrote.

    Args:
        folder: of safetensors files; one that is not on this host is not judged.
        fingerprints: of all tensors of the push, by name; only those of their bytes are compared.
    """
    if not folder.is_dir() or not any(text.startswith(BYTES) for text in fingerprints.values()):
        return ""
    files = sorted(folder.glob("*.safetensors"))
    try:
        return next(filter(None, (_why_damaged(file, fingerprints) for file in files)), "")
    except (OSError, ValueError) as error:
        return f"{folder}: {error}"


def _why_damaged(file: Path, fingerprints: Mapping[str, str]) -> str:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        placed = read_header(file, descriptor).placed(os.fstat(descriptor).st_size)
        num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(num_threads, "hash") as threads:
            found = list(threads.map(partial(_fingerprint, descriptor), placed))
    finally:
        os.close(descriptor)
    for tensor, text in zip(placed, found, strict=True):
        if text != fingerprints.get(tensor.name):
            return f"tensor {tensor.name!r} in {file} is not what the trainer wrote"
    return ""


def _fingerprint(descriptor: int, tensor: PlacedTensor) -> str:
    hasher = start(tensor.name, tensor.dtype, tensor.shape)
    for piece in FileBytes(descriptor, tensor.offset, tensor.num_bytes).pieces(_PIECE_BYTES):
        hasher.update(piece)
    return host_fingerprint_of(hasher)
