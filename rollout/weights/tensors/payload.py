"""Tensors as the bytes that SGLang's ``update_weights_from_tensor`` and its LoRA twin read.

Always true: what is made holds no tensor's memory: not a view's whole storage, nor anything that
changes when the trainer's tensor does; CUDA IPC handles are the one exception, and say so.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors become handles

from engines.embedded.fingerprint import as_bytes

Pairs = Sequence[tuple[str, torch.Tensor]]


@dataclass
class FlattenedTensorMetadata:
    """Where one tensor lies in a flattened bucket; named after SGLang's class of these fields,
    whose name the pickle bears."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


_SGLANG_NAME = b"csglang.srt.weight_sync.tensor_bucket\nFlattenedTensorMetadata\n"


class _Pickler(pickle._Pickler):  # the one in C cannot name a class that is not installed
    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is FlattenedTensorMetadata:
            self.write(_SGLANG_NAME)  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]


class _HandlePickler(_Pickler):
    """Puts handles in the place of the memory of CUDA tensors, as torch's processes do."""

    dispatch_table = copyreg.dispatch_table | ForkingPickler._extra_reducers  # type: ignore[attr-defined]


def flattened_bucket(pairs: Pairs) -> bytes:
    """One bucket as one tensor of bytes on the CPU, ``load_format="flattened_bucket"``."""
    return _dump(_Pickler, _flatten(pairs, torch.device("cpu")))


def ipc_bucket(pairs: Pairs) -> tuple[bytes, torch.Tensor]:
    """The same as a CUDA IPC handle, and the tensor behind it: keep that until the engine has
    read it.  Not run where this was written, for want of a GPU."""
    bucket = _flatten(pairs, pairs[0][1].device)
    return _dump(_HandlePickler, bucket), bucket["flattened_tensor"]


def _flatten(pairs: Pairs, device: torch.device) -> dict[str, Any]:
    # Wide elements first: what follows them is then aligned whatever its own width.
    ordered = sorted(pairs, key=lambda pair: -pair[1].itemsize)
    num_bytes = sum(tensor.nbytes for _, tensor in ordered)
    flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    metadata = []
    start = 0
    for name, tensor in ordered:
        end = start + tensor.nbytes
        flat[start:end].copy_(as_bytes(tensor))
        metadata.append(
            FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, end - start)
        )
        start = end
    return {"flattened_tensor": flat, "metadata": metadata}


def _dump(pickler: type[_Pickler], value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def pickled_pairs(pairs: Pairs) -> bytes:
    """A pickle of ``[(name, tensor)]``, by value and on the CPU."""
    # A view would drag its whole storage into the pickle, hence the contiguous copy of its own.
    return pickle.dumps(
        [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in pairs],
        protocol=pickle.HIGHEST_PROTOCOL,
    )


def adapter_payload(pairs: Pairs) -> bytes:
    """A LoRA adapter's tensors: SGLang wants a dict of them."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in pairs}
    return pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)
