"""Weights out of safetensors files, into the model.

Always true: every header is checked before the first byte of the model changes.

The bytes are read straight into the parameters.  Mapping a file for one load would cost a page
fault for every few pages, more than the copy; those that come again and again stay (``mapped``).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engines.embedded.copies import joined
from engines.embedded.errors import Invalid
from engines.embedded.fingerprint import as_bytes
from engines.embedded.headers import DTYPES, Contents, Piece, read_header
from engines.embedded.mapped import MappedFiles
from engines.embedded.proving import Placed, Proofs, read_proofs
from engines.embedded.reading import read_copies
from engines.mapping import FileMapping

if TYPE_CHECKING:
    from engines.embedded.weights import Weights

# One keeps a core busy with copying out of the page cache.
_MOST_READERS = 4
_BATCH_BYTES = 16 << 20

Job = Callable[[], None]


def checkpoint_files(path: str) -> list[Path]:
    """The safetensors files of a checkpoint directory, or the one file."""
    place_on_disk = Path(path)
    if place_on_disk.is_file():
        return [place_on_disk]
    files = sorted(place_on_disk.glob("*.safetensors")) if place_on_disk.is_dir() else []
    if not files:
        raise Invalid(f"no safetensors at {path}")
    return files


def update_from_disk(weights: Weights, path: str, mapped: MappedFiles | None = None) -> None:
    """Overwrite the model from a checkpoint, or a part of one; headers are checked first.

    Where the checkpoint has a file of fingerprints, every tensor is proved where it was read to.

    Args:
        mapped: where files are kept that stay; None reads them like any other.
    """
    has_begun = False
    try:
        proofs = read_proofs(Path(path))
        with ExitStack() as stack:
            opened: list[tuple[Path, int]] = []
            for file in checkpoint_files(path):
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                opened.append((file, descriptor))
            if proofs is None:
                jobs = [job for one in opened for job in _jobs(weights, *one, mapped)]
            else:
                jobs = _proving_jobs(weights, proofs, [descriptor for _, descriptor in opened])
            has_begun = True
            _do_all(jobs)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        state = "the weights are now a mixture" if has_begun else "nothing was updated"
        raise Invalid(f"cannot read {path}: {error}; {state}") from error


def _jobs(weights: Weights, file: Path, descriptor: int, mapped: MappedFiles | None) -> list[Job]:
    """What there is to do for one file, which has been checked."""
    header = _header_of(descriptor)
    kept = mapped.find(file, descriptor) if mapped else None
    if kept is None or kept.header != header:
        contents = Contents(header, os.fstat(descriptor).st_size)
        placed, others = _placed(weights, contents)
        copies = [
            joined((home.address, offset, home.num_bytes) for _, home, offset in batch)
            for batch in _batches(placed)
        ]
        if mapped is None or not contents.stays or others:
            jobs: list[Job] = [partial(read_copies, descriptor, batch) for batch in copies]
            return jobs + [partial(_convert, weights, descriptor, one) for one in others]
        kept = kept or mapped.keep(file, descriptor)
        kept.header, kept.copies = header, copies
    return [partial(kept.copy, batch) for batch in kept.copies]


def _proving_jobs(weights: Weights, proofs: Proofs, descriptors: Sequence[int]) -> list[Job]:
    jobs: list[Job] = []
    names: list[str] = []
    for descriptor in descriptors:
        num_bytes = os.fstat(descriptor).st_size
        contents = Contents(_header_of(descriptor), num_bytes)
        names += contents.entries
        placed, others = _placed(weights, contents)
        if contents.stays:
            mapping = FileMapping(descriptor, num_bytes, is_writable=False)
            prove = partial(proofs.copy, mapping)
        else:
            prove = partial(proofs.read, descriptor)
        jobs += [partial(prove, batch) for batch in _batches(placed)]
        jobs += [partial(_convert, weights, descriptor, one, proofs) for one in others]
    proofs.check_names(names)
    return jobs


def _header_of(descriptor: int) -> bytes:
    return read_header(lambda num_bytes, offset: os.pread(descriptor, num_bytes, offset))


def _placed(weights: Weights, contents: Contents) -> tuple[list[Placed], list[Piece]]:
    """Where the bytes of a file go; and what cannot simply be copied there.

    Raises:
        Invalid: it does not fit the model.
    """
    placed: list[Placed] = []
    others: list[Piece] = []
    homes, start, room = weights.homes, contents.start, contents.room
    for name, entry in contents.entries.items():
        begin, end = entry["data_offsets"]
        home = homes.get(name)
        if (
            home is not None
            and DTYPES.get(entry["dtype"]) is home.dtype
            and entry["shape"] == home.shape
            and end - begin == home.num_bytes
            and begin >= 0
            and end <= room
        ):
            placed.append((name, home, start + begin))
        else:
            others.append(contents.piece(name))
    if others or not placed:
        weights.check((one.name, one.shape, one.dtype) for one in others)
    return placed, others


def _batches(placed: Sequence[Placed]) -> Iterator[Sequence[Placed]]:
    """Of some megabytes each: experts' tensors are many and small."""
    first = size = 0
    for index, (_, home, _) in enumerate(placed):
        size += home.num_bytes
        if size >= _BATCH_BYTES:
            yield placed[first : index + 1]
            first, size = index + 1, 0
    if first < len(placed):
        yield placed[first:]


def _do_all(jobs: Sequence[Job]) -> None:
    num_readers = min(_MOST_READERS, len(jobs), len(os.sched_getaffinity(0)))
    if num_readers < 2:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(num_readers, "read-weights") as readers:
        # Each takes the next when it is done with one, so that they end together.
        for _ in readers.map(lambda job: job(), jobs):
            pass


def _convert(weights: Weights, descriptor: int, piece: Piece, proofs: Proofs | None = None) -> None:
    loaded = torch.empty(piece.shape, dtype=piece.dtype)
    if proofs is None:
        read_copies(descriptor, [(loaded.data_ptr(), piece.offset, piece.num_bytes)])
    else:
        array: Any = as_bytes(loaded).numpy()
        proofs.read_apart(descriptor, piece, memoryview(array))
    weights.find(piece.name).copy_(loaded)
