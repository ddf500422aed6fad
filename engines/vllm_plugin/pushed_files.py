"""Pushed buckets as tensors: safetensors files in shared memory, or in the request itself.

Always true: a file is checked by its header before a tensor is made of it; nothing in it is
executed; a tensor of a file is a view of the mapping, which the trainer may write again after the
request.
"""

from __future__ import annotations

import base64
import binascii
import os
import warnings
from pathlib import Path
from tempfile import TemporaryFile

import torch

from engines.tensors.file_mapping import FileMapping
from engines.tensors.safetensors_header import PlacedTensor, read_header


def tensors_at(path: str) -> dict[str, torch.Tensor]:
    """The tensors of all safetensors files in a folder, or of one file.

    Raises:
        ValueError: there is none, one is damaged, or two hold the same name.
        OSError: one cannot be read.
    """
    place = Path(path)
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no safetensors at {path}; push a folder with *.safetensors files")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for name, tensor in _mapped(str(file), descriptor):
                if name in found:
                    raise ValueError(f"two files in {path} hold tensor {name!r}")
                found[name] = tensor
        finally:
            os.close(descriptor)
    return found


def tensors_in(content: str) -> dict[str, torch.Tensor]:
    """The tensors of one safetensors file in base64.

    Raises:
        ValueError: it is damaged.
    """
    try:
        data = base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the pushed content is not base64: {error}") from None
    with TemporaryFile(dir="/dev/shm") as file:  # so that one reader serves both ways
        file.write(data)
        file.flush()
        return dict(_mapped("the pushed content", file.fileno()))


def _mapped(name: str, descriptor: int) -> list[tuple[str, torch.Tensor]]:
    num_bytes = os.fstat(descriptor).st_size
    placed = read_header(name, descriptor).placed(num_bytes)
    mapping = FileMapping(descriptor, num_bytes, is_writable=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it must not be written: it is not
        whole = torch.frombuffer(mapping.view, dtype=torch.uint8)
    return [(tensor.name, view_of(whole, tensor)) for tensor in placed]


def view_of(whole: torch.Tensor, placed: PlacedTensor) -> torch.Tensor:
    """One tensor of the bytes ``whole``; a copy if it is not aligned there."""
    dtype: torch.dtype = getattr(torch, placed.dtype)
    content = whole[placed.offset : placed.offset + placed.num_bytes]
    if placed.offset % dtype.itemsize:
        content = content.clone()
    return content.view(dtype).reshape(placed.shape)
