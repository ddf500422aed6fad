"""Pushed buckets in the memory of another process on the same GPU, opened by CUDA IPC.

Always true: the layout of a bucket and its handle are checked before the memory is opened; nothing
in them is executed; a tensor is a view of the trainer's memory, which is the trainer's again after
the request.  Not tested on a GPU.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing import reductions

from engines.tensors.safetensors_header import Header, PlacedTensor
from engines.vllm_plugin.pushed_files import view_of

_NO_OBJECTS = "update_info.layout and update_info.handles are JSON objects"
_BYTES, _NUMBERS = ("memory", "counter", "event"), ("num_bytes", "offset", "counter_offset")


def tensors_behind(layout: Any, handles: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a bucket on this worker's GPU.

    Args:
        layout: name -> ``dtype``, ``shape`` and ``data_offsets``, as in a safetensors file.
        handles: UUID of a GPU -> ``rebuild_cuda_tensor``'s arguments that are not always equal;
            bytes in base64.
        device: of this worker.

    Raises:
        ValueError: the worker is on a CPU, no handle is of its GPU, or the handle or the layout
            is damaged.
    """
    if device.type != "cuda":
        raise ValueError(
            f"CUDA IPC handles came to a worker on {device}, which cannot open them; set "
            "weights.transport to shared_memory, by_value or disk"
        )
    if not isinstance(handles, Mapping):
        raise ValueError(_NO_OBJECTS)
    uuid = str(torch.cuda.get_device_properties(device.index).uuid)
    if uuid not in handles:
        raise ValueError(
            f"this worker is on GPU {uuid}, and the pushed handles are of {', '.join(handles)}"
        )
    data, (num_bytes, offset, counter_offset), waits, placed = read_handle(
        uuid, handles[uuid], layout
    )
    whole = reductions.rebuild_cuda_tensor(
        torch.Tensor,
        (num_bytes,),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        device.index,
        data["memory"],
        num_bytes,
        offset,
        False,
        data["counter"],
        counter_offset,
        data["event"],
        waits,
    )
    return {tensor.name: view_of(whole, tensor) for tensor in placed}


def read_handle(
    uuid: str, handle: Any, layout: Any
) -> tuple[dict[str, bytes], list[int], bool, list[PlacedTensor]]:
    """Bytes, numbers and flag of one handle, and where the tensors lie in its memory.

    Raises:
        ValueError: the handle or the layout is damaged.
    """
    if not isinstance(layout, Mapping):
        raise ValueError(_NO_OBJECTS)
    try:
        data = {name: base64.b64decode(handle[name], validate=True) for name in _BYTES}
        numbers, waits = [handle[name] for name in _NUMBERS], handle["waits"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the handle of GPU {uuid} is damaged: {error!r}") from None
    if any(type(number) is not int or number < 0 for number in numbers) or type(waits) is not bool:
        raise ValueError(f"the handle of GPU {uuid} is damaged: {numbers}, {waits!r}")
    header = Header("the pushed bucket", b"", {}, layout)
    start = header.num_bytes
    placed = header.placed(start + numbers[0])
    return (
        data,
        numbers,
        waits,
        [tensor._replace(offset=tensor.offset - start) for tensor in placed],
    )
