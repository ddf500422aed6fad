"""The tensors of a push as plain bytes, from whatever brings them to the engines.

Always true: nothing is executed on the way, and no tensor library is needed: the pickles that
SGLang wants are read by a machine that knows four names and makes byte ranges of them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from engines.mapping import FileMapping
from engines.protocol import STAYS
from rollout.errors import WeightsUnavailable
from rollout.weights.store.writer import Content, FileBytes, MemoryBytes

_MAX_HEADER_BYTES = 100_000_000


def tensors_of(payload: bytes | Mapping[str, Any]) -> Iterator[tuple[str, Content]]:
    """Name and bytes of every tensor in one bucket.  Those in files are to be used before the next
    one is asked for; those in memory stay as long as the bucket's sender leaves them alone.

    Raises:
        WeightsUnavailable: this kind of bucket leaves no copy of the tensors here, or it cannot
            be read any more.
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


def _in_folder(folder: Path) -> Iterator[tuple[str, Content]]:
    try:
        for path in sorted(folder.glob("*.safetensors")):
            yield from _in_file(path)
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise WeightsUnavailable(f"what was pushed by {folder} is gone: {error}") from error


def _in_file(path: Path) -> Iterator[tuple[str, Content]]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} has a header of {length} bytes")
        header = json.loads(os.pread(descriptor, length, 8))
        start, num_bytes = 8 + length, os.fstat(descriptor).st_size
        mapping = None
        if STAYS in header.pop("__metadata__", {}):
            mapping = FileMapping(descriptor, num_bytes, is_writable=False)
        for name, entry in header.items():
            begin, end = (start + offset for offset in entry["data_offsets"])
            if not start <= begin <= end <= num_bytes:
                raise ValueError(f"{name!r} ends at byte {end} of {num_bytes}")
            if mapping is None:
                yield name, FileBytes(descriptor, begin, end - begin)
            else:
                yield name, MemoryBytes(mapping.view[begin:end], mapping.address + begin)
    finally:
        os.close(descriptor)


# -- pickles: by value --------------------------------------------------------------------------


def _in_pickle(payload: bytes) -> Iterator[tuple[str, Content]]:
    try:
        value = _Reader(io.BytesIO(payload)).load()
        if isinstance(value, dict) and "flattened_tensor" in value:
            whole = value["flattened_tensor"].content()
            for one in value["metadata"]:
                yield one.fields["name"], whole[one.fields["start_idx"] : one.fields["end_idx"]]
        else:
            for name, tensor in value:
                yield name, tensor.content()
    except (pickle.PickleError, EOFError, AttributeError, TypeError, KeyError, ValueError) as error:
        raise WeightsUnavailable(f"a pushed bucket cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _Storage:
    content: memoryview
    element_bytes: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    first: int
    shape: tuple[int, ...]

    def content(self) -> memoryview:
        size = self.storage.element_bytes
        return self.storage.content[self.first * size : (self.first + prod(self.shape)) * size]


class _Fields:
    """An object of another library, of which only the fields matter."""

    def __init__(self, *values: Any) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = state[1] if isinstance(state, tuple) else state


def _rebuild_tensor(
    storage: _Storage, first: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _Tensor:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            raise ValueError("a pushed tensor is not contiguous")
        expected *= size
    return _Tensor(storage, first, tuple(shape))


class _StorageReader(pickle.Unpickler):
    """The pickle that names a storage, before its bytes."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a storage")

    def persistent_load(self, pid: Any) -> int:
        num_elements: int = pid[4]
        return num_elements


def _load_storage(data: bytes) -> _Storage:
    """What ``torch.save`` makes of a storage in a pickle: five small pickles, a count, bytes."""
    stream = io.BytesIO(data)
    for _ in range(3):  # a magic number, a format, the machine's integers
        _Reader(stream).load()
    num_elements = _StorageReader(stream).load()
    _Reader(stream).load()  # its key
    content = memoryview(data)[stream.tell() + 8 :]
    return _Storage(content, len(content) // num_elements if num_elements else 1)


class _Reader(pickle.Unpickler):
    """Knows the names that occur in buckets, and no others."""

    _KNOWN: Mapping[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        ("torch.storage", "_load_from_bytes"): _load_storage,
        ("collections", "OrderedDict"): dict,
        ("torch", "Size"): tuple,
        ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): _Fields,
    }

    def find_class(self, module: str, name: str) -> Any:
        known = self._KNOWN.get((module, name))
        if known is not None:
            return known
        with suppress(KeyError):
            return _DTYPES[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a push")


_DTYPES = {
    ("torch", name): name
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
