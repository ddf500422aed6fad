"""Reading SGLang's weight payloads without running what is in them.

A payload is a base64 pickle of ``[(name, tensor)]`` or of a flattened bucket.  Always true: the
pickle is read as values (``engines.tensors.payload``), and tensors are made here, of sizes that
were compared with the bytes that are there; bytes that two tensors share are copied once.
"""

from __future__ import annotations

from typing import Any

import pybase64
import torch
from torch.multiprocessing import reductions

from engines.embedded.core.errors import Invalid
from engines.tensors.payload.weight_payload import (
    HANDLES,
    ArrayTensor,
    MemoryHandle,
    StridedTensor,
    load_payload,
)

NamedTensors = list[tuple[str, torch.Tensor]]


def read_payload(payload: str, load_format: str | None) -> NamedTensors:
    """The named tensors of one base64 payload.

    Raises:
        Invalid: it holds anything else.
    """
    if load_format not in (None, "direct", "auto", "flattened_bucket"):
        raise Invalid(f"load_format {load_format!r} is not supported")
    try:
        content = pybase64.b64decode_as_bytearray(payload, validate=True)
        # Handles to memory of another process on the same GPU are meaningless on a CPU.
        loaded = load_payload(content, HANDLES if torch.cuda.is_available() else None)
    except Exception as error:
        raise Invalid(f"payload is not base64 of a pickle of tensors: {error}") from error
    if load_format == "flattened_bucket":
        return _split_bucket(loaded)
    pairs = loaded.items() if isinstance(loaded, dict) else loaded
    if not isinstance(loaded, dict | list | tuple):
        raise Invalid("payload is not a list of (name, tensor)")
    builder = _TensorBuilder()
    return [_named(pair, builder) for pair in pairs]


def _named(pair: Any, builder: _TensorBuilder) -> tuple[str, torch.Tensor]:
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise Invalid("payload is not a list of (name, tensor)")
    name, value = pair
    try:
        return name, builder.make(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Invalid(f"{name} is neither a tensor nor an array: {error}") from None


def _split_bucket(loaded: Any) -> NamedTensors:
    try:
        flat = _TensorBuilder().make(loaded["flattened_tensor"]).view(-1).view(torch.uint8)
        named = []
        for entry in loaded["metadata"]:
            begin, end = entry.place(flat.nbytes)
            part = flat[begin:end].view(getattr(torch, entry.dtype))
            named.append((entry.name, part.view(entry.shape)))
        return named
    except (TypeError, KeyError, AttributeError, ValueError, RuntimeError) as error:
        raise Invalid(f"payload is not a flattened bucket: {error}") from error


class _TensorBuilder:
    """Makes tensors of the values of one payload."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], torch.Tensor] = {}

    def make(self, value: Any) -> torch.Tensor:
        """A tensor; ValueError or RuntimeError if the value is none."""
        if isinstance(value, ArrayTensor):
            value = value.tensor
        if isinstance(value, MemoryHandle):
            return _opened(value.checked())
        if not isinstance(value, StridedTensor):
            raise ValueError(f"it is a {type(value).__name__}")
        whole = self._copy(value.memory).view(getattr(torch, value.dtype))
        return whole.as_strided(value.shape, value.strides, value.first)

    def _copy(self, memory: memoryview) -> torch.Tensor:
        """The bytes at an address that fits each dtype; in the payload they begin anywhere."""
        if not memory.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        found = torch.frombuffer(memory, dtype=torch.uint8)
        key = found.data_ptr(), memory.nbytes
        if key not in self._copies:
            self._copies[key] = found.clone()
        return self._copies[key]


def _opened(handle: MemoryHandle) -> torch.Tensor:
    """The memory of another process; its GPU may be a UUID: each process counts on its own."""
    dtype = getattr(torch, handle.dtype)
    if not handle.num_bytes:
        return torch.empty(handle.shape, dtype=dtype)
    device = handle.device
    own = handle._replace(
        kind=torch.Tensor,
        storage_kind=torch.storage.TypedStorage,
        dtype=dtype,
        device=_device_of(device) if isinstance(device, str) else device,
        requires_grad=False,
    )
    # This thread's stream waits for the trainer's copies.  It is the device's default one, as that
    # of the generation thread, which reads the memory.
    opened: torch.Tensor = reductions.rebuild_cuda_tensor(*own)
    return opened.detach()


def _device_of(uuid: str) -> int:
    own = [
        str(torch.cuda.get_device_properties(device).uuid)
        for device in range(torch.cuda.device_count())
    ]
    if uuid not in own:
        raise Invalid(f"the payload is on GPU {uuid}, and this engine has {', '.join(own)}")
    return own.index(uuid)
