"""Payloads of ``update_weights_from_tensor`` in the plugin's form: a file, or handles as JSON.

Always true: no pickle reaches the engine.  A payload is read with a table of the names that may be
in it, and the memory behind a handle is not opened here.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

from engines.tensors.payload.weight_payload import (
    HANDLES,
    BucketEntry,
    MemoryHandle,
    load_payload,
    tensors_in,
)
from engines.tensors.safetensors_header import make_header, word_of


def update_info(payloads: Sequence[str]) -> dict[str, Any]:
    """The plugin's ``update_info``.

    Args:
        payloads: one for each tensor-parallel rank, in base64.  By value they are equal, and the
            first is read; CUDA IPC handles of the same bucket each name their GPU.

    Returns:
        ``{"content"}``, a safetensors file in base64, or ``{"layout", "handles"}``: tensors as in
        the header of such a file, and by UUID of the GPU what opens the memory that holds them.

    Raises:
        ValueError: they hold neither.
    """
    try:
        first = _loaded(payloads[0])
        if not _has_handle(first):
            return {"content": _content(first)}
        buckets = [first, *map(_loaded, payloads[1:])]
        layouts = [_layout(bucket["metadata"]) for bucket in buckets]
        if any(layout != layouts[0] for layout in layouts):
            raise ValueError("the handles are of different buckets")
        handles = (bucket["flattened_tensor"] for bucket in buckets)
        return {
            "layout": layouts[0],
            "handles": {handle.device: _json_of(handle) for handle in handles},
        }
    except Exception as error:  # unpickling can raise anything
        raise ValueError(
            f"vLLM takes tensors by value and CUDA IPC handles of flat buckets, and this payload "
            f"has none: {error}"
        ) from None


def _loaded(payload: str) -> Any:
    return load_payload(base64.b64decode(payload), HANDLES)


def _has_handle(loaded: Any) -> bool:
    return isinstance(loaded, dict) and isinstance(loaded.get("flattened_tensor"), MemoryHandle)


def _content(loaded: Any) -> str:
    tensors = list(tensors_in(loaded))
    header, _ = make_header((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    return base64.b64encode(header + b"".join(tensor.content for tensor in tensors)).decode()


def _layout(entries: Iterable[BucketEntry]) -> dict[str, Any]:
    layout: dict[str, Any] = {}
    for entry in entries:
        if entry.name in layout:
            raise ValueError(f"two tensors are named {entry.name!r}")
        layout[entry.name] = {
            "dtype": word_of(entry.name, entry.dtype),
            "shape": list(entry.shape),
            "data_offsets": [entry.start_idx, entry.end_idx],
        }
    return layout


def _json_of(handle: MemoryHandle) -> dict[str, Any]:
    if not isinstance(handle.device, str):
        raise ValueError(
            f"a handle names GPU {handle.device}, a number that each process counts on its own, "
            "and no UUID"
        )
    handle = handle.checked()
    found = (handle.shape, handle.strides, handle.first, handle.dtype)
    if found != ((handle.num_bytes,), (1,), 0, "uint8"):
        raise ValueError("a handle is not of the bytes of a whole bucket")
    return {
        "memory": _text(handle.memory),
        "num_bytes": handle.num_bytes,
        "offset": handle.offset,
        "counter": _text(handle.counter),
        "counter_offset": handle.counter_offset,
        "event": _text(handle.event),
        "waits": handle.waits,
    }


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
