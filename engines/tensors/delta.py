"""Deltas: what differs in a tensor from an earlier version of it, as a tensor of bytes.

A delta has the name of its tensor with ``#delta`` after it, so every route carries it:

    4 bytes   how long the head is
    head      JSON: the fields of ``Delta``
    37 bytes  fingerprint of head and body
    body      from each changed element to the next (uint8, uint16 or uint32), then new values

Always true: it has the new values and no differences, so every bit is the trainer's; it is checked
whole, by its fingerprint, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
import orjson
import torch

from engines.tensors.dtypes import element_bytes
from engines.tensors.fingerprint import host_fingerprint_of, start_with
from engines.tensors.torch_fingerprint import as_bytes

SUFFIX = "#delta"
POSITION_BYTES = 4
_GAPS = (np.uint8, np.uint16, np.uint32)
MOST_ELEMENTS = 2**31
_LENGTH_BYTES = 4
_FINGERPRINT_BYTES = 37
_MOST_DIMENSIONS = 64  # of torch
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Delta:
    """The head of one.

    Attributes:
        name, dtype, shape: of the whole tensor.
        base: the weight version that it changes.
        num_changed: elements.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    base: str
    num_changed: int


@dataclass(frozen=True, slots=True, eq=False)
class ReadDelta(Delta):
    """One that was read, and is whole.

    Attributes:
        positions: of the changed elements in the flat tensor.
        values: what is there from now on, as ``bits_of`` has it.
    """

    positions: torch.Tensor
    values: torch.Tensor

    def __str__(self) -> str:
        return f"a delta of {self.dtype} {self.name!r} from weight version {self.base}"

    def apply(self, tensor: torch.Tensor) -> None:
        """Change the elements of a tensor that has this dtype and shape."""
        bits = bits_of(tensor)
        bits.scatter_(0, self.positions.to(bits.device), self.values.to(bits.device))
        if not tensor.is_contiguous():
            tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as integers, flat: equal if all their bits are, as those of NaN and -0.0.

    Of a contiguous tensor it is a view.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def is_delta(name: str) -> bool:
    """Whether a pushed tensor of this name is a delta."""
    return name.endswith(SUFFIX)


def make_delta(delta: Delta, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The bytes of a delta.

    Args:
        positions: int32, in the flat tensor, ascending.
        values: the new elements there, as ``bits_of`` has them.
    """
    head = orjson.dumps(asdict(delta))
    gaps = np.diff(positions.numpy(), prepend=0)
    kind = next(kind for kind in _GAPS if not gaps.size or gaps.max() <= np.iinfo(kind).max)
    body = torch.cat([torch.from_numpy(gaps.astype(kind).view(np.uint8)), as_bytes(values)])
    prefix = len(head).to_bytes(_LENGTH_BYTES, "little") + head + _fingerprint(head, body)
    return torch.cat([torch.frombuffer(bytearray(prefix), dtype=torch.uint8), body])


def read_delta(name: str, content: torch.Tensor) -> ReadDelta:
    """The delta that was pushed under ``name``.

    Raises:
        ValueError: it is damaged, or of another tensor.
    """
    content = as_bytes(content.cpu())
    size = int.from_bytes(bytes(content[:_LENGTH_BYTES].tolist()), "little")
    head = bytes(content[_LENGTH_BYTES : _LENGTH_BYTES + size].numpy())
    begin = _LENGTH_BYTES + size + _FINGERPRINT_BYTES
    body = content[begin:]
    expected = bytes(content[_LENGTH_BYTES + size : begin].numpy())
    if expected != _fingerprint(head, body):
        raise ValueError(f"{name!r} is damaged: its fingerprint is another")
    try:
        delta = Delta(**orjson.loads(head))
    except TypeError:
        raise ValueError(f"{name!r} is a delta of another version of rollout") from None
    _check_head(name, delta)
    width, num = element_bytes(delta.dtype), delta.num_changed
    sizes = {num * (np.dtype(kind).itemsize + width): kind for kind in _GAPS}
    if name != delta.name + SUFFIX or body.numel() not in sizes:
        raise ValueError(f"{name!r} has a delta of {delta.name!r}, or of another length")
    gaps = np.frombuffer(body.numpy(), sizes[body.numel()], num)
    positions = torch.from_numpy(np.cumsum(gaps, dtype=np.int64))
    values = body[gaps.nbytes :].clone().view(_INTEGERS[width])  # an aligned copy
    if num and int(positions[-1]) >= prod(delta.shape):
        raise ValueError(f"{name!r} changes elements that the tensor does not have")
    return ReadDelta(**asdict(delta), positions=positions, values=values)


def _check_head(name: str, delta: Delta) -> None:
    shape = delta.shape
    is_shape = isinstance(shape, list | tuple) and len(shape) <= _MOST_DIMENSIONS
    numbers = [*shape, delta.num_changed] if is_shape else [None]
    texts = (delta.name, delta.dtype, delta.base)
    if not all(isinstance(text, str) for text in texts) or not all(
        type(number) is int and 0 <= number < 1 << 63 for number in numbers
    ):
        raise ValueError(f"{name!r} has a head that is none of a delta")


def apply_all(
    name: str, dtype: str, shape: Sequence[int], content: memoryview, deltas: Sequence[bytes]
) -> None:
    """Change the bytes of a tensor by several deltas, the oldest first.

    Raises:
        ValueError: one is damaged or of another tensor; those before it are applied.
    """
    for encoded in deltas:
        flat = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        delta = read_delta(name + SUFFIX, flat)
        if (delta.dtype, list(delta.shape)) != (dtype, list(shape)):
            raise ValueError(f"the delta of {name!r} is for {delta.dtype} {delta.shape}")
        if delta.num_changed:
            delta.apply(torch.frombuffer(content, dtype=torch.uint8).view(delta.values.dtype))


def _fingerprint(head: bytes, body: torch.Tensor) -> bytes:
    hasher = start_with(head)
    content: Any = body.numpy()  # numpy's types hide that it is a buffer
    hasher.update(memoryview(content))
    return host_fingerprint_of(hasher).encode()
