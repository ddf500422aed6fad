"""CUDA IPC without a GPU: a handle holds the bytes themselves, and a "GPU" is host memory.

A thread stands for a process with a GPU of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

DEVICE, HANDLE = 6, 7
DESCRIPTOR = b"a file descriptor of another process"
HAS_ACCELERATOR_SETTINGS = hasattr(torch._C, "_accelerator_getAllocatorSettings")
"""Torch 2.11 has them only in a copy of all that its allocator knows."""
Set = Callable[[Any, str, Any], None]
"""``setattr``, or that of a ``MonkeyPatch``."""

opened: list[Any] = []
"""The device of each handle that was opened, as torch would get it."""
streams: list[StreamDouble] = []
"""The streams that were made."""


def some_pairs(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Tensors of three dtypes, that with the widest elements first."""
    torch.manual_seed(seed)
    wide = torch.randn(33, 65)
    return [("wide", wide), ("narrow", wide.to(torch.bfloat16)[:7]), ("odd", wide.view(-1)[:5] > 0)]


class StreamDouble:
    """A stream: what it was given is done when somebody waits for it.

    Attributes:
        waiting: what is not done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waiting: list[Callable[[], object]] = []
        self._num_done = 0
        streams.append(self)

    def wait_stream(self, other: CurrentStream) -> None:
        assert other.device == self.device

    def record_event(self) -> SimpleNamespace:
        end = self._num_done + len(self.waiting)

        def synchronize() -> None:
            while self._num_done < end:
                self.waiting.pop(0)()
                self._num_done += 1

        return SimpleNamespace(synchronize=synchronize)


@dataclass(frozen=True)
class CurrentStream:
    """A stream on which work is done at once; without a name, the default one of its GPU."""

    device: torch.device
    name: str = ""


@dataclass(frozen=True)
class _Properties:
    uuid: str


class CudaDouble:
    """GPUs with these UUIDs.

    Attributes:
        num_collects: calls of ``torch.cuda.ipc_collect``.
        made_on: the GPU of each tensor, by address.
        settings: of torch's allocator; ``all_settings``: each that it was changed to.
        num_snapshots: copies of all that the allocator knows of its memory.
        set_error: what a change of them raises.
        expandable: addresses in expandable segments, which no other process can open.
        registered: bytes of pinned memory, by address.
        register_error: what ``cudaHostRegister`` returns; 0 for success.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self.uuids = list(uuids)
        self.num_collects = 0
        self.made_on: dict[int, int] = {}
        self.settings = ""
        self.all_settings: list[str] = []
        self.num_snapshots = 0
        self.set_error: Exception | None = None
        self.expandable: set[int] = set()
        self.registered: dict[int, int] = {}
        self.register_error = 0
        self._current = threading.local()

    def use(self, index: int) -> None:
        """The GPU of this thread."""
        self._current.index = index

    def _stream_of(self, device: torch.device | None = None) -> CurrentStream:
        own: CurrentStream | None = getattr(self._current, "stream", None)
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return own if own is not None and own.device == device else CurrentStream(device)

    def _set_device(self, device: torch.device | int) -> None:
        self.use(device if isinstance(device, int) else device.index)

    def _set_stream(self, stream: CurrentStream) -> None:
        self.use(stream.device.index)
        self._current.stream = stream

    def install(self, patch: Set) -> None:
        opened.clear()
        streams.clear()
        empty = torch.empty

        def on_host(*size: Any, device: Any = None, **more: Any) -> torch.Tensor:
            is_cuda = device is not None and torch.device(device).type == "cuda"
            made: torch.Tensor = empty(*size, device=None if is_cuda else device, **more)
            if is_cuda:
                self._note(made, torch.device(device))
            return made

        patch(torch, "empty", on_host)
        if HAS_ACCELERATOR_SETTINGS:
            patch(torch._C, "_accelerator_getAllocatorSettings", lambda: self.settings)
        if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
            patch(torch._C, "_accelerator_setAllocatorSettings", self._set)
        patch(torch.cuda.memory, "_snapshot", self._snapshot)
        patch(torch.cuda.memory, "_set_allocator_settings", self._set)
        patch(torch.cuda, "is_available", lambda: True)
        patch(torch.cuda, "is_initialized", lambda: True)
        patch(torch.cuda, "device_count", lambda: len(self.uuids))
        patch(torch.cuda, "current_device", lambda: getattr(self._current, "index", 0))
        patch(torch.cuda, "ipc_collect", self._collect)
        patch(torch.cuda, "cudart", lambda: self)
        patch(torch.cuda, "Stream", StreamDouble)
        patch(torch.cuda, "current_stream", self._stream_of)
        patch(torch.cuda, "set_stream", self._set_stream)
        patch(torch.cuda, "set_device", self._set_device)
        patch(torch.cuda, "stream", self._on_stream)
        patch(torch.cuda, "get_device_properties", lambda index: _Properties(self.uuids[index]))
        patch(reductions, "reduce_tensor", self._reduce)
        patch(reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)

    @contextmanager
    def _on_stream(self, stream: StreamDouble) -> Iterator[None]:
        copy = torch.Tensor.copy_

        def later(target: Any, source: Any, non_blocking: bool = False) -> Any:
            if not non_blocking:
                return copy(target, source)
            stream.waiting.append(partial(copy, target, source))
            return target

        import pytest  # the Python of vLLM, which runs vllm_reload.py, has none

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.Tensor, "copy_", later)
            yield

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.register_error:
            self.registered[address] = num_bytes
        return self.register_error

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, self.registered.pop(address))  # it must still be mapped
        return 0

    def _snapshot(self) -> dict[str, Any]:
        self.num_snapshots += 1
        return {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.settings}}

    def _collect(self) -> None:
        self.num_collects += 1

    def _note(self, made: torch.Tensor, device: torch.device) -> None:
        number = self._current.index if device.index is None else device.index
        self.made_on[made.data_ptr()] = number
        self.expandable.discard(made.data_ptr())
        if "expandable_segments:True" in self.settings:
            self.expandable.add(made.data_ptr())

    def _set(self, settings: str) -> None:
        if self.set_error is not None:
            raise self.set_error
        self.settings = settings
        self.all_settings.append(settings)

    def _reduce(self, tensor: torch.Tensor) -> Any:
        size, content = tensor.nbytes, tensor.numpy().tobytes()
        if tensor.data_ptr() in self.expandable:
            content = DESCRIPTOR
        shape = (tensor.size(), tensor.stride(), 0, torch.UntypedStorage, tensor.dtype)
        counters = (size, 0, False, b"counter", 0, b"event", True)
        gpu = self.made_on.get(tensor.data_ptr(), getattr(self._current, "index", 0))
        return reductions.rebuild_cuda_tensor, (torch.Tensor, *shape, gpu, content, *counters)


def rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
    """In place of torch's: ends where it would call the driver."""
    opened.append(arguments[DEVICE])
    if arguments[HANDLE] == DESCRIPTOR:
        raise RuntimeError("pidfd_getfd: Operation not permitted")
    return torch.frombuffer(bytearray(arguments[HANDLE]), dtype=arguments[5])


rebuild_cuda_tensor.__module__ = reductions.__name__
