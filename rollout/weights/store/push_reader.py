"""Reads the tensors of a push as plain bytes, from any transport that carries them.

Always true: no code in a payload is executed, and no tensor library is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engines.protocol import STAYS
from engines.tensors.file_mapping import FileMapping
from engines.tensors.payload.weight_payload import load_payload, tensors_in
from engines.tensors.safetensors_header import read_header
from rollout.core.errors import WeightsUnavailable
from rollout.weights.format.pushed_files import FileBytes
from rollout.weights.routes.buffers import is_in_pool
from rollout.weights.store.node.writer import MemoryBytes, TensorContent


class TrainerLeft(WeightsUnavailable):
    """The trainer whose memory has the tensors has ended, and they with it."""


def tensors_of(payload: bytes | Mapping[str, Any]) -> Iterator[tuple[str, TensorContent]]:
    """Name and bytes of every tensor in one bucket.  Use bytes in a file before taking the next
    tensor; bytes in memory are valid until the sender of the bucket overwrites them.

    Raises:
        WeightsUnavailable: this kind of bucket has no copy of the tensors here, or it cannot be
            read any more.
        TrainerLeft: it was removed at the end of its trainer.
    """
    if isinstance(payload, bytes):
        yield from _in_pickle(payload)
    elif "path" in payload:
        yield from _in_folder(Path(payload["path"]))
    else:
        raise WeightsUnavailable(
            f"a bucket of {', '.join(payload)} has no tensors in it: with this transport the "
            "trainer's memory goes to the engines and nowhere else"
        )


# -- safetensors files: shared memory and disk ----------------------------------------------------


def _in_folder(folder: Path) -> Iterator[tuple[str, TensorContent]]:
    try:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError("it has no safetensors files")
        for path in files:
            yield from _in_file(path)
    except FileNotFoundError as error:
        if is_in_pool(folder):
            raise TrainerLeft(
                f"the trainer that pushed it has ended or closed its pusher, and {folder} went "
                "with it"
            ) from error
        raise WeightsUnavailable(f"the pushed folder {folder} is gone: {error}") from error
    except (OSError, ValueError) as error:
        raise WeightsUnavailable(f"the pushed folder {folder} is gone: {error}") from error


def _in_file(path: Path) -> Iterator[tuple[str, TensorContent]]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header, num_bytes = read_header(path, descriptor), os.fstat(descriptor).st_size
        mapping = None
        if STAYS in header.metadata:
            mapping = FileMapping(descriptor, num_bytes, is_writable=False)
        for tensor in header.placed(num_bytes):
            begin, end = tensor.offset, tensor.offset + tensor.num_bytes
            if mapping is None:
                yield tensor.name, FileBytes(descriptor, begin, tensor.num_bytes)
            else:
                yield tensor.name, MemoryBytes(mapping.view[begin:end], mapping.address + begin)
    finally:
        os.close(descriptor)


# -- pickles: by value --------------------------------------------------------------------------


def _in_pickle(payload: bytes) -> Iterator[tuple[str, TensorContent]]:
    try:
        for tensor in tensors_in(load_payload(payload)):
            yield tensor.name, tensor.content
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise WeightsUnavailable(f"a pushed bucket cannot be read: {error}") from error
