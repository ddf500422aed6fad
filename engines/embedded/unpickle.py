"""Reading SGLang's weight payloads without running what is in them.

A payload is a base64 pickle of ``[(name, tensor)]`` or of a flattened bucket.  A pickle can name
any function; this reader knows only those that rebuild a tensor or an array from bytes.
"""

from __future__ import annotations

import binascii
import io
import pickle
from dataclasses import dataclass
from typing import Any

import pybase64
import torch

from engines.embedded.errors import Invalid

NamedTensors = list[tuple[str, torch.Tensor]]

_ALLOWED = {
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
_ALLOWED_ON_CUDA = {
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch.storage", "UntypedStorage"),
    ("torch", "UntypedStorage"),
}


@dataclass
class BucketEntry:
    """Where one tensor lies in a flattened bucket; SGLang's ``FlattenedTensorMetadata``."""

    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    start_idx: int = 0
    end_idx: int = 0
    numel: int = 0


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage  # torch's own unpickles whatever is inside
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) in _ALLOWED_ON_CUDA and torch.cuda.is_available():
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name == "FlattenedTensorMetadata" and module.startswith("sglang."):
            return BucketEntry
        raise Invalid(f"payload names {module}.{name}; only tensors and arrays are read")


def _load_storage(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def read_payload(payload: str, load_format: str | None) -> NamedTensors:
    """The named tensors of one base64 payload; ``Invalid`` if it holds anything else."""
    try:
        loaded = _Reader(io.BytesIO(pybase64.b64decode(payload, validate=True))).load()
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
    return [_named(pair) for pair in _listed(pairs)]


def _listed(pairs: Any) -> list[Any]:
    try:
        return list(pairs)
    except TypeError:
        raise Invalid("payload is not a list of (name, tensor)") from None


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
        entries = loaded["metadata"]
        return [
            (
                entry.name,
                flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape),
            )
            for entry in entries
        ]
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise Invalid(f"payload is not a flattened bucket: {error}") from error
