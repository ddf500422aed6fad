"""Encodes tensors for SGLang's ``update_weights_from_tensor`` and its LoRA equivalent.

Always true: a payload is a copy: it holds no view's whole storage, and does not change with the
trainer's tensor.  CUDA IPC handles are the one exception; another process can open their memory,
whatever torch's allocator is set to.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from engines.tensors.torch_fingerprint import as_bytes
from rollout.core.errors import WeightMismatch

Pairs = Sequence[tuple[str, torch.Tensor]]


@dataclass
class FlattenedTensorMetadata:
    """Where one tensor is in a flattened bucket. The pickle has the name of SGLang's class, which
    has these fields."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


_OWN_NAME = f"c{__name__}\nFlattenedTensorMetadata\n".encode()
_SGLANG_NAME = b"csglang.srt.weight_sync.tensor_bucket\nFlattenedTensorMetadata\n"


# Of the arguments of torch's ``rebuild_cuda_tensor``.
_DEVICE = 6


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Reduce a tensor as torch does between processes, but name its GPU by UUID, which SGLang reads
    in place of a number: each process counts only the GPUs that it sees."""
    rebuild, arguments = reductions.reduce_tensor(tensor)
    device = arguments[_DEVICE]
    if isinstance(device, int):
        device = str(torch.cuda.get_device_properties(device).uuid)
    return rebuild, (*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])


class _HandlePickler(pickle.Pickler):
    """Pickles CUDA tensors as handles."""

    dispatch_table = (
        copyreg.dispatch_table
        | ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        | {torch.Tensor: _reduce_tensor}
    )


def flattened_bucket(pairs: Pairs) -> bytes:
    """One bucket as one tensor of bytes on the CPU, ``load_format="flattened_bucket"``.

    The pickle is built by hand around the tensors' bytes: a pickler would copy them three times,
    each time into new memory.
    """
    metadata, ordered = _laid_out(pairs)
    contents = [_host_bytes(tensor) for tensor in ordered]
    num_bytes = sum(content.nbytes for content in contents)
    storage = _storage_head(num_bytes)
    return b"".join(
        (
            pickle.PROTO + b"\x03",
            pickle.EMPTY_DICT + pickle.MARK,
            _ops("metadata"),
            _named_as_sglang_does(pickle.dumps(metadata, 3))[2:-1],
            _ops("flattened_tensor"),
            # _rebuild_tensor_v2(_load_from_bytes(...), 0, (num_bytes,), (1,), False, OrderedDict())
            _ops(torch._utils._rebuild_tensor_v2) + pickle.MARK,
            _ops(torch.storage._load_from_bytes),
            pickle.BINBYTES8 + struct.pack("<Q", len(storage) + num_bytes),
            storage,
            *contents,
            pickle.TUPLE1 + pickle.REDUCE,
            _ops(0) + _ops(num_bytes) + pickle.TUPLE1 + _ops(1) + pickle.TUPLE1 + _ops(False),
            _ops(OrderedDict) + pickle.EMPTY_TUPLE + pickle.REDUCE,
            pickle.TUPLE + pickle.REDUCE,
            pickle.SETITEMS + pickle.STOP,
        )
    )


def _ops(value: Any) -> bytes:
    """The opcodes that push ``value`` on the pickle stack. They do not use the memo: another part
    of the same pickle numbers its memo from 0."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 3)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()[2:-1]


def _storage_head(num_bytes: int) -> bytes:
    """What ``torch.save`` writes before the bytes of a uint8 storage."""
    identity = ("storage", torch.ByteStorage, "0", "cpu", num_bytes, None)
    machine = {
        "protocol_version": 1001,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    return b"".join(
        (
            pickle.dumps(0x1950A86A20F9469CFC6C, 2),
            pickle.dumps(1001, 2),
            pickle.dumps(machine, 2),
            pickle.PROTO + b"\x02" + _ops(identity) + pickle.BINPERSID + pickle.STOP,
            pickle.dumps(["0"], 2),
            struct.pack("<q", num_bytes),
        )
    )


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """A flattened bucket in the memory of one GPU.

    Attributes:
        handle: the opcodes that open it in another process on that GPU.
        flat: its memory; keep it until the engine has read it.
    """

    handle: bytes
    flat: torch.Tensor


def ipc_handle(pairs: Pairs, device: torch.device, settings: ExportSettings) -> IpcHandle:
    """Flatten a bucket on a GPU.  Not tested on a GPU.

    Args:
        settings: of this push.

    Raises:
        WeightMismatch: the device is no GPU.
    """
    if device.type != "cuda":
        raise WeightMismatch(
            f"tensor {pairs[0][0]!r} is on {device}: weights.transport = cuda_ipc pushes tensors "
            "of a GPU; leave weights.transport out, or set it to shared_memory",
            tensor=pairs[0][0],
        )
    metadata, ordered = _laid_out(pairs)
    num_bytes = sum(tensor.nbytes for tensor in ordered)
    with settings.in_effect():
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    for place, tensor in zip(metadata, ordered, strict=True):
        flat[place.start_idx : place.end_idx].copy_(as_bytes(tensor))
    # No wait for these copies: torch records an event on this stream with the handle
    # (``CudaIPCSentData``; it waits itself when it has too many), and ``rebuild_cuda_tensor``, with
    # which every engine opens it, makes the engine's stream wait for the event.
    return IpcHandle(_handle_ops(flat), flat)


def around_handle(pairs: Pairs) -> tuple[bytes, bytes]:
    """What is before and after the handle in the pickle of a bucket; equal on all ranks."""
    metadata, _ = _laid_out(pairs)
    head = pickle.PROTO + b"\x03" + pickle.EMPTY_DICT + pickle.MARK + _ops("flattened_tensor")
    named = _named_as_sglang_does(pickle.dumps(metadata, 3))[2:-1]
    return head, _ops("metadata") + named + pickle.SETITEMS + pickle.STOP


def _handle_ops(flat: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    pickler = _HandlePickler(stream, 3)
    pickler.fast = True  # as in ``_ops``
    pickler.dump(flat)
    return stream.getvalue()[2:-1]


def _laid_out(pairs: Pairs) -> tuple[list[FlattenedTensorMetadata], list[torch.Tensor]]:
    # Wide elements first, so that all tensors are aligned.
    ordered = sorted(pairs, key=lambda pair: -pair[1].itemsize)
    metadata = []
    start = 0
    for name, tensor in ordered:
        end = start + tensor.nbytes
        place = FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, end - start)
        metadata.append(place)
        start = end
    return metadata, [tensor for _, tensor in ordered]


def _named_as_sglang_does(pickled: bytes) -> bytes:
    """Replace the class's name by SGLang's: a pickler could write that only with SGLang installed.
    The name occurs once, before any tensor's name; later uses refer to it."""
    return pickled.replace(_OWN_NAME, _SGLANG_NAME, 1)


def _host_bytes(tensor: torch.Tensor) -> memoryview:
    array: Any = as_bytes(tensor).cpu().numpy()  # numpy's types do not declare a buffer
    return memoryview(array)


def adapter_payload(pairs: Pairs) -> bytes:
    """Encode a LoRA adapter's tensors: SGLang loads a dict."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in pairs}
    return pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)


# -- memory that another process can open ------------------------------------------------------

# With ``expandable_segments`` torch exports a file descriptor, which the engine must take from
# this process with ``pidfd_getfd``.  That needs the rights of a debugger, which containers refuse,
# and an engine ends of it.  Torch uses no expandable segment for what is allocated while they are
# off.
_EXPANDABLE = "expandable_segments"
# The settings are of the process: two pushes must not take each other's for the trainer's.
_allocator_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """Settings of torch's allocator for what one push allocates.

    A value and no question at each bucket: torch 2.11 answers with a copy of all that the allocator
    knows of its memory.  A trainer may change its settings between two pushes.

    Attributes:
        own: the trainer's, when the push began; they are in effect again after each bucket.
        for_export: the same without expandable segments, or empty if the trainer's are without.
    """

    own: str
    for_export: str

    @classmethod
    def now(cls) -> ExportSettings:
        """For a push that begins.

        Raises:
            Exception: torch's own; the settings cannot be read or changed.
        """
        with _allocator_lock:
            own = _allocator_settings()
        fields = [field.strip() for field in own.split(",")]
        for_export = ""
        if any(map(_is_expandable, fields)):
            # All fields: torch resets those that the text does not have.
            kept = [field for field in fields if field and not field.startswith(_EXPANDABLE)]
            for_export = ",".join([*kept, f"{_EXPANDABLE}:False"])
        found = cls(own, for_export)
        with found.in_effect():  # an error is raised here, before anything is sent
            return found

    @contextmanager
    def in_effect(self) -> Iterator[None]:
        """What is allocated inside is in no expandable segment."""
        if not self.for_export:
            yield
            return
        with _allocator_lock:
            _set_allocator(self.for_export)
            try:
                yield
            finally:
                _set_allocator(self.own)


def _is_expandable(field: str) -> bool:
    name, _, value = field.partition(":")
    return name.strip() == _EXPANDABLE and value.strip().lower() in ("true", "1")


def _allocator_settings() -> str:
    """The allocator settings in effect; a trainer may have changed them since it started."""
    internals: Any = torch._C
    if hasattr(internals, "_accelerator_getAllocatorSettings"):
        return str(internals._accelerator_getAllocatorSettings())
    found: Any = torch.cuda.memory._snapshot()
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = found["allocator_settings"]
    return next((str(settings[name]) for name in names if settings.get(name)), "")


def _set_allocator(settings: str) -> None:
    internals: Any = torch._C
    if hasattr(internals, "_accelerator_setAllocatorSettings"):
        internals._accelerator_setAllocatorSettings(settings)
        return
    of_cuda: Any = torch.cuda.memory
    of_cuda._set_allocator_settings(settings)
