"""What is stored and moved together: one expert of one layer, or a piece of a dense layer.

Always true: every tensor is in exactly one unit and is never split; the tensors of one unit have
one element size, so that units can stand one after the other in a file and stay aligned; the same
manifest gives the same units, in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from rollout.errors import WeightMismatch
from rollout.weights.manifest import Manifest, TensorSpec

_EXPERT = re.compile(r"^(.*\bexperts\.\d+)\.")
_LAYER = re.compile(r"^(.*?\.\d+)\.")

# Torch's name -> safetensors' name and bytes of one element.
_ELEMENTS = {
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that stay together.

    Attributes:
        name: of the expert or layer they belong to, with a number where that has several units.
    """

    name: str
    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(bytes_of(tensor) for tensor in self.tensors)

    @property
    def element_bytes(self) -> int:
        return element_of(self.tensors[0])[1]


def element_of(tensor: TensorSpec) -> tuple[str, int]:
    """Safetensors' word for a tensor's dtype, and the bytes of one element.

    Raises:
        WeightMismatch: a dtype that a safetensors file cannot hold.
    """
    try:
        return _ELEMENTS[tensor.dtype]
    except KeyError:
        raise WeightMismatch(
            f"tensor {tensor.name!r} is {tensor.dtype}, which the store cannot keep; it keeps "
            f"{', '.join(_ELEMENTS)}",
            tensor=tensor.name,
        ) from None


def bytes_of(tensor: TensorSpec) -> int:
    """Bytes of a tensor's contents."""
    return prod(tensor.shape) * element_of(tensor)[1]


def make_units(manifest: Manifest, unit_bytes: int) -> tuple[Unit, ...]:
    """The units of a model: tensors of one expert or layer, up to about ``unit_bytes`` each."""
    owners: dict[tuple[str, int], list[TensorSpec]] = {}
    for tensor in manifest.tensors.values():
        key = _owner_of(tensor.name), element_of(tensor)[1]
        owners.setdefault(key, []).append(tensor)
    return tuple(
        unit
        for (owner, element_bytes), tensors in owners.items()
        for unit in _cut(f"{owner}/{element_bytes}", tensors, unit_bytes)
    )


def _owner_of(name: str) -> str:
    found = _EXPERT.match(name) or _LAYER.match(name)
    return found.group(1) if found else ""


def _cut(owner: str, tensors: Iterable[TensorSpec], unit_bytes: int) -> Iterable[Unit]:
    part: list[TensorSpec] = []
    size = count = 0
    for tensor in tensors:
        if part and size + bytes_of(tensor) > unit_bytes:
            yield Unit(f"{owner}/{count}", tuple(part))
            part, size, count = [], 0, count + 1
        part.append(tensor)
        size += bytes_of(tensor)
    if part:
        yield Unit(f"{owner}/{count}", tuple(part))
