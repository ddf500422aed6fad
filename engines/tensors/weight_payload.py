"""Payloads of ``update_weights_from_tensor``, read without executing what they name.

A payload is a pickle of ``[(name, tensor)]`` or of a flattened bucket, and a pickle can name any
function.  Always true: a reader knows the names in its table; any other ends the reading.
``load_payload`` makes byte ranges of tensors and needs no tensor library.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from engines.tensors.dtypes import DTYPES, element_bytes

Known = Mapping[tuple[str, str], Any]
"""Module and name -> what the reader takes for it."""


@dataclass
class BucketEntry:
    """Where one tensor lies in a flattened bucket; SGLang's ``FlattenedTensorMetadata``."""

    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: Any = ""
    start_idx: int = 0
    end_idx: int = 0
    numel: int = 0


class PayloadReader(pickle.Unpickler):
    """Reads one pickle.

    Args:
        known: what may be in it, besides the entries of a flattened bucket.
        imported: modules and names that may be in it as they are.
    """

    def __init__(
        self, stream: io.BytesIO, known: Known, imported: Set[tuple[str, str]] = frozenset()
    ) -> None:
        super().__init__(stream)
        self._known = known
        self._imported = imported

    def find_class(self, module: str, name: str) -> Any:
        if name == "FlattenedTensorMetadata" and module.startswith("sglang."):
            return BucketEntry
        if (module, name) in self._imported:
            return super().find_class(module, name)
        known = self._known.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(
                f"a payload names {module}.{name}; only tensors and arrays are read"
            )
        return known


class PayloadTensor(NamedTuple):
    """One tensor of a payload.

    Attributes:
        dtype: torch's name, for example ``bfloat16``.
        content: its bytes, contiguous; they are not copied out of the payload.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: memoryview


def load_payload(payload: bytes, others: Known | None = None) -> Any:
    """What is in a payload that torch has made on the CPU, by value; see ``tensors_in``.

    Args:
        others: what may be in it besides tensors.

    Raises:
        pickle.UnpicklingError: it names something else.
        EOFError, AttributeError, TypeError, KeyError, ValueError: it is no payload.
    """
    return PayloadReader(io.BytesIO(payload), {**_KNOWN, **(others or {})}).load()


def tensors_in(loaded: Any) -> Iterator[PayloadTensor]:
    """The tensors of a payload that was loaded here.

    Raises:
        AttributeError, TypeError, KeyError, ValueError: it has another form.
    """
    if isinstance(loaded, dict) and "flattened_tensor" in loaded:
        whole = loaded["flattened_tensor"].content()
        for entry in loaded["metadata"]:
            content = whole[entry.start_idx : entry.end_idx]
            yield PayloadTensor(entry.name, entry.dtype, tuple(entry.shape), content)
    else:
        for name, tensor in loaded:
            yield PayloadTensor(name, tensor.storage.dtype, tensor.shape, tensor.content())


# -- torch's pickles of tensors -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    content: memoryview


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    first: int
    shape: tuple[int, ...]

    def content(self) -> memoryview:
        size = element_bytes(self.storage.dtype)
        return self.storage.content[self.first * size : (self.first + prod(self.shape)) * size]


def _rebuild_tensor(
    storage: _Storage, first: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _Tensor:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            raise ValueError("a pushed tensor is not contiguous")
        expected *= size
    return _Tensor(storage, first, tuple(shape))


class _StorageReader(PayloadReader):
    """The pickle that names a storage, before its bytes."""

    def persistent_load(self, pid: Any) -> str:
        dtype: str = pid[1]
        return dtype


def _load_storage(data: bytes) -> _Storage:
    """What ``torch.save`` makes of a storage in a pickle: five small pickles, a count, bytes."""
    stream = io.BytesIO(data)
    for _ in range(3):  # a magic number, a format, the machine's integers
        PayloadReader(stream, {}).load()
    dtype = _StorageReader(stream, _STORAGES).load()
    PayloadReader(stream, {}).load()  # its key
    return _Storage(dtype, memoryview(data)[stream.tell() + 8 :])


_STORAGES: Known = {
    ("torch", f"{word}Storage"): dtype
    for word, dtype in {
        "Double": "float64",
        "Float": "float32",
        "Half": "float16",
        "BFloat16": "bfloat16",
        "Long": "int64",
        "Int": "int32",
        "Short": "int16",
        "Char": "int8",
        "Byte": "uint8",
        "Bool": "bool",
    }.items()
}
_KNOWN: Known = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): tuple,
    **{("torch", dtype): dtype for dtype in DTYPES},
}
