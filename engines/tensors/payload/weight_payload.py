"""Payloads of ``update_weights_from_tensor``, read without executing what they name.

A payload is a pickle of ``[(name, tensor)]`` or of a flattened bucket.  Always true: what is made
of one are values of this module, whose sizes are compared with the bytes that are there; no object
of numpy or torch is made of what a payload names.  No tensor library is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from engines.protocol.plain_text import value_text
from engines.tensors.dtypes import DTYPES, element_bytes
from engines.tensors.payload.pickled_values import Find, read_pickle

Known = Mapping[tuple[str, str], Any]
"""Module and name -> what the reader takes for it."""

# Of torch, and more than any model has.
_MAX_DIMENSIONS = 64
_MAX_TEXT = 100
MOST_SHARED = 4
"""The tensors of a payload have at most so many times its bytes: they may share some."""


@dataclass
class BucketEntry:
    """Where one tensor lies in a flattened bucket; SGLang's ``FlattenedTensorMetadata``."""

    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: Any = ""
    start_idx: int = 0
    end_idx: int = 0
    numel: int = 0

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name in self.__dataclass_fields__.keys() & state.keys():
            setattr(self, name, state[name])

    def place(self, num_bytes: int) -> tuple[int, int]:
        """Where its bytes begin and end in a bucket of so many.

        Raises:
            ValueError: they do not lie there, or are not as many as its shape and dtype need.
        """
        if not isinstance(self.name, str):
            raise ValueError("a bucket has a tensor whose name is no text")
        begin, end = whole_numbers((self.start_idx, self.end_idx))
        wanted = prod(whole_numbers(self.shape)) * _element_bytes(self.dtype)
        if not begin <= end <= num_bytes or end - begin != wanted:
            raise ValueError(
                f"{value_text(self.name)} lies at {begin} to {end} in a bucket of {num_bytes} "
                f"bytes, and has {wanted}"
            )
        return begin, end


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


def load_payload(payload: bytes | bytearray, others: Known | None = None) -> Any:
    """What is in a payload that torch has made on the CPU, by value; see ``tensors_in``.

    Args:
        others: what may be in it besides tensors.

    Raises:
        ValueError: it names something else, or it is no payload.
    """
    return read_pickle(memoryview(payload), _finding({**_KNOWN, **(others or {})}))[0]


def tensors_in(loaded: Any) -> Iterator[PayloadTensor]:
    """The tensors of a payload that was loaded here.

    Raises:
        AttributeError, TypeError, KeyError, ValueError: it has another form, or its tensors are the
            same few bytes again and again.
    """
    num_bytes = 0
    for tensor in _listed(loaded):
        num_bytes += tensor.content.nbytes
        # A pickle names what it has had in two bytes.
        if num_bytes > MOST_SHARED * memoryview(tensor.content.obj).nbytes:
            raise ValueError(
                f"the tensors of a payload have more than {MOST_SHARED} times its bytes"
            )
        yield tensor


def _listed(loaded: Any) -> Iterator[PayloadTensor]:
    if isinstance(loaded, dict) and "flattened_tensor" in loaded:
        whole = loaded["flattened_tensor"].content()
        for entry in loaded["metadata"]:
            begin, end = entry.place(whole.nbytes)
            yield PayloadTensor(entry.name, entry.dtype, tuple(entry.shape), whole[begin:end])
    else:
        for name, tensor in loaded:
            yield PayloadTensor(name, tensor.dtype, tensor.shape, tensor.content())


def _finding(known: Known) -> Find:
    def find(module: str, name: str) -> Any:
        if name == "FlattenedTensorMetadata" and module.startswith("sglang."):
            return BucketEntry
        if (module, name) not in known:
            named = f"{module}.{name}"[:_MAX_TEXT]
            raise ValueError(f"a payload names {named}; only tensors and arrays are read")
        return known[module, name]

    return find


# -- sizes ----------------------------------------------------------------------------------------


def whole_numbers(values: Any) -> tuple[int, ...]:
    """Sizes, strides or offsets, as they are.

    Raises:
        ValueError: they are not a few numbers from 0 on, of at most 63 bits.
    """
    if not isinstance(values, tuple | list) or len(values) > _MAX_DIMENSIONS:
        raise ValueError(f"a tensor has sizes for at most {_MAX_DIMENSIONS} dimensions")
    if not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise ValueError("a tensor has a size or an offset that is no number from 0 on")
    return tuple(values)


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first one of a strided tensor to its last one, both included.

    Raises:
        ValueError: there are strides of other dimensions, or elements that share memory.
    """
    found = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    if 0 in shape:
        return 0
    if prod(shape) > found:
        raise ValueError(f"a tensor of {prod(shape)} elements lies in {found}")
    return found


def _element_bytes(dtype: Any) -> int:
    if not isinstance(dtype, str):
        raise ValueError("a tensor has a dtype that is none of torch's")
    return element_bytes(dtype)


# -- torch's pickles of tensors -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    memory: memoryview


@dataclass(frozen=True, slots=True)
class StridedTensor:
    """A tensor in the bytes of a payload, all of it within them.

    Attributes:
        memory: bytes of its storage; ``first``: the element there that is its first.
    """

    dtype: str
    memory: memoryview
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, storage: Any, first: Any, shape: Any, strides: Any) -> StridedTensor:
        """A part of a storage.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(storage, _Storage):
            raise ValueError(f"a tensor lies in a {type(storage).__name__}")
        (first,), shape, strides = map(whole_numbers, ((first,), shape, strides))
        num_bytes = (first + span(shape, strides)) * _element_bytes(storage.dtype)
        if num_bytes > storage.memory.nbytes:
            raise ValueError(
                f"a tensor needs {num_bytes} bytes of a storage that has {storage.memory.nbytes}"
            )
        return cls(storage.dtype, storage.memory, first, shape, strides)

    def content(self) -> memoryview:
        """Its bytes.

        Raises:
            ValueError: they are not one after another.
        """
        if any(
            size != 1 and stride != expected
            for size, stride, expected in zip(
                self.shape, self.strides, _row_strides(self.shape), strict=True
            )
        ):
            raise ValueError("a pushed tensor is not contiguous")
        size = _element_bytes(self.dtype)
        return self.memory[self.first * size : (self.first + prod(self.shape)) * size]


def _row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[place + 1 :]) for place in range(len(shape)))


def _rebuild_tensor(storage: Any, first: Any, shape: Any, strides: Any, *_: Any) -> StridedTensor:
    return StridedTensor.of(storage, first, shape, strides)


def _rebuild_parameter(tensor: Any, *_: Any) -> Any:
    return tensor


def _storage_dtype(identity: Any) -> str:
    if isinstance(identity, tuple) and len(identity) > 1 and identity[1] in _STORAGES.values():
        dtype: str = identity[1]
        return dtype
    raise ValueError("a storage has a type that is none of torch's")


def _load_storage(data: Any) -> _Storage:
    """What ``torch.save`` makes of a storage in a pickle: five small pickles, a count, bytes."""
    data = _bytes(data)
    end = 0
    for _ in range(3):  # a magic number, a format, the machine's integers
        _, end = read_pickle(data, _finding({}), end)
    dtype, end = read_pickle(data, _finding(_STORAGES), end, _storage_dtype)
    _, end = read_pickle(data, _finding({}), end)  # its key
    memory = data[end + 8 :]
    if not isinstance(dtype, str) or memory.nbytes % _element_bytes(dtype):
        raise ValueError(f"a storage has {memory.nbytes} bytes, which are no whole elements")
    return _Storage(dtype, memory)


def _bytes(data: Any) -> memoryview:
    if not isinstance(data, memoryview):
        raise ValueError(f"a tensor's bytes are a {type(data).__name__}")
    return data


def _size(values: Any) -> tuple[int, ...]:
    return whole_numbers(values)


def _ordered_dict() -> dict[str, Any]:
    return {}


# -- numpy's pickles of arrays --------------------------------------------------------------------

_ARRAY_TYPES = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u8": "uint64",
    "u4": "uint32",
    "u2": "uint16",
    "u1": "uint8",
    "b1": "bool",
}


class _ArrayType:
    """numpy's dtype; only what is in the table above."""

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or code not in _ARRAY_TYPES:
            raise ValueError(f"an array has a dtype that is none of {', '.join(_ARRAY_TYPES)}")
        self.dtype = _ARRAY_TYPES[code]

    def __setstate__(self, state: Any) -> None:
        _, order, *parts = state
        if order not in ("<", "|") or any(part is not None for part in parts[:3]):
            raise ValueError("an array has fields or another order of bytes than this machine")


class ArrayTensor:
    """An array of numpy.

    Attributes:
        tensor: what it holds, or None until it is filled.
    """

    tensor: StridedTensor | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_by_columns, content = state
        self.tensor = _array(content, kind, shape, "F" if is_by_columns else "C").tensor


def _array(content: Any, kind: Any, shape: Any, order: Any = "C") -> ArrayTensor:
    if not isinstance(kind, _ArrayType):
        raise ValueError("an array has no dtype")
    storage, shape = _Storage(kind.dtype, _bytes(content)), whole_numbers(shape)
    if prod(shape) * _element_bytes(kind.dtype) != storage.memory.nbytes:
        raise ValueError(f"an array of {value_text(shape)} has {storage.memory.nbytes} bytes")
    strides = _row_strides(shape) if order == "C" else _row_strides(shape[::-1])[::-1]
    made = ArrayTensor()
    made.tensor = StridedTensor.of(storage, 0, shape, strides)
    return made


def _empty_array(*_: Any) -> ArrayTensor:
    return ArrayTensor()


# -- handles to memory of another process ---------------------------------------------------------


class MemoryHandle(NamedTuple):
    """The arguments of torch's ``rebuild_cuda_tensor``, in its order."""

    kind: Any
    shape: Any
    strides: Any
    first: Any
    storage_kind: Any
    dtype: Any
    device: Any
    memory: Any
    num_bytes: Any
    offset: Any
    requires_grad: Any
    counter: Any
    counter_offset: Any
    event: Any
    waits: Any

    def checked(self) -> MemoryHandle:
        """The same, of which all sizes fit and all values have their type.

        Raises:
            ValueError: they do not.
        """
        shape, strides = whole_numbers(self.shape), whole_numbers(self.strides)
        numbers = (self.first, self.num_bytes, self.offset, self.counter_offset)
        first, num_bytes, offset, counter_offset = whole_numbers(numbers)
        if (first + span(shape, strides)) * _element_bytes(self.dtype) > num_bytes:
            raise ValueError(f"a handle of {num_bytes} bytes is smaller than its tensor")
        if type(self.device) not in (int, str) or type(self.waits) is not bool:
            raise ValueError("a handle names its GPU by neither a number nor a UUID")
        parts = (self.memory, self.counter, self.event) if num_bytes else ()
        memory, counter, event = (bytes(_bytes(part)) for part in parts) if parts else (b"",) * 3
        return self._replace(
            shape=shape,
            strides=strides,
            first=first,
            memory=memory,
            num_bytes=num_bytes,
            offset=offset,
            counter=counter,
            counter_offset=counter_offset,
            event=event,
        )


HANDLES: Known = {
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): MemoryHandle,
    ("torch", "Tensor"): "Tensor",
    ("torch.nn.parameter", "Parameter"): "Parameter",
    ("torch.storage", "TypedStorage"): "TypedStorage",
    ("torch.storage", "UntypedStorage"): "UntypedStorage",
    ("torch", "UntypedStorage"): "UntypedStorage",
}
"""What may be in a payload of CUDA IPC handles besides."""

_STORAGES: Known = {
    ("torch", f"{word}Storage"): dtype
    for word, dtype in {
        "ComplexDouble": "complex128",
        "ComplexFloat": "complex64",
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
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch", "Size"): _size,
    **{("torch", dtype): dtype for dtype in DTYPES},
    ("numpy", "dtype"): _ArrayType,
    ("numpy", "ndarray"): "ndarray",
    **{
        (f"numpy.{core}.{module}", name): made
        for core in ("core", "_core")
        for module, name, made in (
            ("multiarray", "_reconstruct", _empty_array),
            ("numeric", "_frombuffer", _array),
        )
    },
}
