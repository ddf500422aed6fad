"""Update the model from safetensors files.

Always true: every header is checked before the first byte of the model changes.

The bytes are read straight into the parameters.  Mapping a file for one load would cost a page
fault for every few pages, more than the copy; files that are pushed repeatedly stay mapped
(``mapped_files``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from engines.embedded.core.errors import Invalid
from engines.embedded.memory.batched_copy import joined, read_copies
from engines.embedded.memory.mapped_files import MappedFiles
from engines.embedded.weights.load_verification import LoadVerifier, Placed, read_verifier
from engines.embedded.weights.model_weights import Location, ModelWeights
from engines.plain_json import WRONG_FORM, read_json
from engines.protocol import STAYS
from engines.tensors.dtypes import DTYPES
from engines.tensors.file_mapping import FileMapping
from engines.tensors.payload.encodings import is_encoded
from engines.tensors.safetensors_header import Header, PlacedTensor, read_header

# Position embeddings, which old checkpoints of Llama have and no model reads.
_COMPUTED = ".rotary_emb.inv_freq"

# One reader keeps a core busy copying from the page cache.
_MOST_READERS = 4
_BATCH_BYTES = 16 << 20

_TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}

ReadJob = Callable[[], object]


def checkpoint_files(path: str) -> list[Path]:
    """The safetensors files of a checkpoint directory, or the one file."""
    place_on_disk = Path(path)
    if place_on_disk.is_file():
        return [place_on_disk]
    index = place_on_disk / "model.safetensors.index.json"
    if index.is_file():  # Mistral's folders have the same weights a second time, by other names
        return [place_on_disk / name for name in _indexed(index)]
    files = sorted(place_on_disk.glob("*.safetensors")) if place_on_disk.is_dir() else []
    if not files:
        raise Invalid(f"no safetensors at {path}")
    return files


def _indexed(index: Path) -> list[str]:
    try:
        names = sorted(set(read_json(index.read_bytes())["weight_map"].values()))
        outside = [name for name in names if os.path.basename(name) != name]
    except (OSError, *WRONG_FORM) as error:
        raise Invalid(f"cannot read {index}: {error}") from None
    if outside:
        raise Invalid(f"{index} names {outside[0]!r}, which is no file of its folder")
    return names


def update_from_disk(
    weights: ModelWeights,
    path: str,
    mapped: MappedFiles | None = None,
    *,
    is_whole: bool = False,
) -> None:
    """Overwrite the model from a checkpoint, or a part of one; headers are checked first.

    Where the checkpoint has a file of fingerprints, every tensor is verified after it was read.

    Args:
        mapped: keeps files mapped whose writer promises a fixed length; None keeps none.
        is_whole: a tensor that the checkpoint lacks is an error.

    Raises:
        Invalid: the checkpoint cannot be read, or does not fit the model.
    """
    has_begun = False
    try:
        verifier = read_verifier(Path(path))
        with ExitStack() as stack:
            opened: list[tuple[Path, int]] = []
            for file in checkpoint_files(path):
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                opened.append((file, descriptor))
            if is_whole:
                weights.check_whole(
                    name
                    for file, descriptor in opened
                    for name in read_header(file, descriptor).entries
                )
            if verifier is None:
                jobs = [
                    job
                    for file, descriptor in opened
                    for job in _jobs(weights, file, descriptor, mapped)
                ]
            else:
                jobs = _verified_jobs(weights, verifier, opened)
            has_begun = True
            _do_all(jobs)
    except (OSError, ValueError) as error:
        state = "the weights are now a mixture" if has_begun else "nothing was updated"
        raise Invalid(f"cannot read {path}: {error}; {state}") from error


def _jobs(
    weights: ModelWeights, file: Path, descriptor: int, mapped: MappedFiles | None
) -> list[ReadJob]:
    """The jobs for one file, whose header has been checked."""
    header = read_header(file, descriptor)
    kept = mapped.find(file, descriptor) if mapped else None
    if kept is None or kept.header != header.text:
        placed, others = _placed(weights, header, os.fstat(descriptor).st_size)
        copies = [
            joined((location.address, offset, location.num_bytes) for _, location, offset in batch)
            for batch in _batches(placed)
        ]
        if mapped is None or STAYS not in header.metadata or others:
            jobs: list[ReadJob] = [partial(read_copies, descriptor, batch) for batch in copies]
            whole = [tensor for tensor in others if not is_encoded(tensor.name)]
            jobs += [partial(_convert, weights, descriptor, tensor) for tensor in whole]
            # These are read and checked before the first job.
            encoded = [tensor for tensor in others if is_encoded(tensor.name)]
            read = [(tensor.name, _read(descriptor, tensor)) for tensor in encoded]
            return jobs + weights.changes(read)
        kept = kept or mapped.keep(file, descriptor)
        kept.header, kept.copies = header.text, copies
    return [partial(kept.copy, batch) for batch in kept.copies]


def _verified_jobs(
    weights: ModelWeights, verifier: LoadVerifier, opened: Sequence[tuple[Path, int]]
) -> list[ReadJob]:
    jobs: list[ReadJob] = []
    names: list[str] = []
    for file, descriptor in opened:
        num_bytes = os.fstat(descriptor).st_size
        header = read_header(file, descriptor)
        names += header.entries
        placed, others = _placed(weights, header, num_bytes)
        if STAYS in header.metadata:
            mapping = FileMapping(descriptor, num_bytes, is_writable=False)
            load = partial(verifier.copy, mapping)
        else:
            load = partial(verifier.read, descriptor)
        jobs += [partial(load, batch) for batch in _batches(placed)]
        jobs += [partial(_convert, weights, descriptor, piece, verifier) for piece in others]
    verifier.check_names(names)
    return jobs


def _placed(
    weights: ModelWeights, header: Header, file_bytes: int
) -> tuple[list[Placed], list[PlacedTensor]]:
    """Where the bytes of a file go, and the tensors that cannot simply be copied.

    Raises:
        Invalid: it does not fit the model.
    """
    placed: list[Placed] = []
    others: list[PlacedTensor] = []
    locations = weights.locations
    for tensor in header.placed(file_bytes):
        if tensor.name.endswith(_COMPUTED):
            continue
        location = locations.get(tensor.name)
        if (
            location is not None
            and _TORCH_DTYPES[tensor.dtype] is location.dtype
            and list(tensor.shape) == location.shape
        ):
            placed.append((tensor.name, location, tensor.offset))
        else:
            others.append(tensor)
    if others or not placed:
        weights.check((tensor.name, tensor.shape, _TORCH_DTYPES[tensor.dtype]) for tensor in others)
    return placed, others


def _batches(placed: Sequence[Placed]) -> Iterator[Sequence[Placed]]:
    """Batches of some megabytes: the tensors of experts are many and small."""
    first = size = 0
    for index, (_, location, _) in enumerate(placed):
        size += location.num_bytes
        if size >= _BATCH_BYTES:
            yield placed[first : index + 1]
            first, size = index + 1, 0
    if first < len(placed):
        yield placed[first:]


def _do_all(jobs: Sequence[ReadJob]) -> None:
    num_readers = min(_MOST_READERS, len(jobs), len(os.sched_getaffinity(0)))
    if num_readers < 2:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(num_readers, "read-weights") as readers:
        # Each thread takes the next job when it is free, so that they end together.
        for _ in readers.map(lambda job: job(), jobs):
            pass


def _read(descriptor: int, tensor: PlacedTensor) -> torch.Tensor:
    loaded = torch.empty(tensor.shape, dtype=_TORCH_DTYPES[tensor.dtype])
    read_copies(descriptor, [(loaded.data_ptr(), tensor.offset, tensor.num_bytes)])
    return loaded


def _convert(
    weights: ModelWeights,
    descriptor: int,
    tensor: PlacedTensor,
    verifier: LoadVerifier | None = None,
) -> None:
    if verifier is None:
        loaded = _read(descriptor, tensor)
    else:
        loaded = torch.empty(tensor.shape, dtype=_TORCH_DTYPES[tensor.dtype])
        verifier.read(descriptor, [(tensor.name, Location.of(loaded), tensor.offset)])
    weights.find(tensor.name).copy_(loaded)
