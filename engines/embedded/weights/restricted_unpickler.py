"""Reading SGLang's weight payloads without running what is in them.

A payload is a base64 pickle of ``[(name, tensor)]`` or of a flattened bucket.  It may name
only the functions that rebuild a tensor or an array from bytes.
"""

from __future__ import annotations

import binascii
import io
from typing import Any

import pybase64
import torch
from torch.multiprocessing import reductions

from engines.embedded.core.errors import Invalid
from engines.tensors.dtypes import DTYPES
from engines.tensors.weight_payload import PayloadReader

NamedTensors = list[tuple[str, torch.Tensor]]

_IMPORTED = {
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("collections", "OrderedDict"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
}
# Handles to memory of another process on the same GPU; meaningless on CPU.
_IMPORTED_ON_CUDA = {
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
    ("torch", "UntypedStorage"),
}


def _load_storage(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


# Of the arguments of ``rebuild_cuda_tensor``.
_DEVICE = 6


def _rebuild_cuda_tensor(*arguments: Any) -> Any:
    """As torch does; the device may be a UUID, because each process counts its GPUs on its own."""
    own: list[Any] = list(arguments)
    if isinstance(own[_DEVICE], str):
        own[_DEVICE] = _device_of(own[_DEVICE])
    return reductions.rebuild_cuda_tensor(*own)


def _device_of(uuid: str) -> int:
    own = [
        str(torch.cuda.get_device_properties(device).uuid)
        for device in range(torch.cuda.device_count())
    ]
    if uuid not in own:
        raise Invalid(f"the payload is on GPU {uuid}, and this engine has {', '.join(own)}")
    return own.index(uuid)


_REPLACED = {
    ("torch.storage", "_load_from_bytes"): _load_storage,  # torch's own unpickles what is inside
    **{("torch", name): getattr(torch, name) for name in DTYPES},
}


_REPLACED_ON_CUDA = _REPLACED | {
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): _rebuild_cuda_tensor
}


def read_payload(payload: str, load_format: str | None) -> NamedTensors:
    """The named tensors of one base64 payload; ``Invalid`` if it holds anything else."""
    imported, replaced = _IMPORTED, _REPLACED
    if torch.cuda.is_available():
        imported, replaced = _IMPORTED | _IMPORTED_ON_CUDA, _REPLACED_ON_CUDA
    try:
        stream = io.BytesIO(pybase64.b64decode(payload, validate=True))
        loaded = PayloadReader(stream, replaced, imported).load()
    except Invalid:
        raise
    except (binascii.Error, ValueError) as error:
        raise Invalid(f"payload is not base64 of a pickle: {error}") from error
    except Exception as error:  # a broken pickle raises anything at all
        raise Invalid(f"payload cannot be unpickled: {error!r}") from error
    if load_format == "flattened_bucket":
        return _split_bucket(loaded)
    if load_format not in (None, "direct", "auto"):
        raise Invalid(f"load_format {load_format!r} is not supported")
    pairs = loaded.items() if isinstance(loaded, dict) else loaded
    try:
        pairs = list(pairs)
    except TypeError:
        raise Invalid("payload is not a list of (name, tensor)") from None
    return [_named(pair) for pair in pairs]


def _named(pair: Any) -> tuple[str, torch.Tensor]:
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise Invalid("payload is not a list of (name, tensor)")
    name, value = pair
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise Invalid(f"{name} is neither a tensor nor an array") from None
    return name, value.detach()


def _split_bucket(loaded: Any) -> NamedTensors:
    try:
        flat = loaded["flattened_tensor"].detach().view(-1).view(torch.uint8)
        named = []
        for entry in loaded["metadata"]:
            part = flat[entry.start_idx : entry.end_idx]
            named.append((entry.name, part.view(entry.dtype).reshape(entry.shape)))
        return named
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise Invalid(f"payload is not a flattened bucket: {error}") from error
