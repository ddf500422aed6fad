"""``torch_memory_saver`` over host memory: release frees it, a wrong order ends the process.

The real library allocates with CUDA's virtual memory calls and is preloaded into the process.
Here every storage that torch allocates inside ``region`` is remembered under the region's tag.
``pause`` gives its whole pages back to the system and forbids them; ``resume`` takes them again,
holding zeros, or what they held before where the region asked for a backup.  A block that is not
paused is resident whether used or not, as on a GPU.

As in the real one: touching paused memory is a fault; pausing what is paused or resuming what is
not ends the process with status 1, and so does each exit but ``os._exit`` after a region in mode
``torch``, whose allocator frees when its own objects are gone.

Where ``NVML_DOUBLE`` names a folder of GPUs, regions are device memory: a pause leaves the host
memory of the process as it is, and what is not paused is written to the file of this process for
each GPU of ``CUDA_VISIBLE_DEVICES``, where a double of NVML reads it.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# malloc keeps its own notes around a block that is free; they stay readable.
_MARGIN_BYTES = 64
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.madvise, _libc.mprotect):
    _call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Block:
    """One storage, and whether its memory is there.

    Attributes:
        has_backup: whether a pause keeps its contents.
    """

    def __init__(self, storage: Any, tag: str, has_backup: bool) -> None:
        self._storage = StorageWeakRef(storage)
        self._address: int = storage.data_ptr()
        self._num_bytes: int = storage.nbytes()
        self.has_backup = has_backup
        self._backup: bytes | None = None
        self.tag = tag
        self.is_paused = False
        self._take()

    @property
    def held_bytes(self) -> int:
        return 0 if self.is_paused else self._num_bytes

    def is_freed(self) -> bool:
        return bool(self._storage.expired())

    def pause(self) -> None:
        if self.has_backup:
            self._backup = ctypes.string_at(self._address, self._num_bytes)
        self.overwrite(0)
        start, length = self._pages()
        if length:
            if not _gpus():
                _check(_libc.madvise(start, length, mmap.MADV_DONTNEED))
            _check(_libc.mprotect(start, length, 0))
        self.is_paused = True

    def resume(self) -> None:
        start, length = self._pages()
        if length:
            _check(_libc.mprotect(start, length, mmap.PROT_READ | mmap.PROT_WRITE))
        self._take()
        if self._backup is not None:
            ctypes.memmove(self._address, self._backup, self._num_bytes)
            self._backup = None
        self.is_paused = False

    def overwrite(self, byte: int) -> None:
        """Fill it with one byte."""
        ctypes.memset(self._address, byte, self._num_bytes)

    def _take(self) -> None:
        """Make its pages resident; the system would wait until each is written to."""
        start, length = self._pages()
        if length:
            _libc.madvise(start, length, _MADV_POPULATE_WRITE)  # no harm where Linux is too old

    def _pages(self) -> tuple[int, int]:
        """The whole pages inside the block: first address and length."""
        page = mmap.PAGESIZE
        first = -(-(self._address + _MARGIN_BYTES) // page) * page
        last = (self._address + self._num_bytes - _MARGIN_BYTES) // page * page
        return first, max(0, last - first)


class _Recorder(TorchDispatchMode):
    """Sees the result of every operator, and so every storage that one allocates."""

    def __init__(self) -> None:
        mode: Any = super()
        mode.__init__()
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                storage = one.untyped_storage()
                if _key(one) not in given and storage.nbytes():
                    # A weak reference would do for what lives on; freed ones are dropped later.
                    self.storages[_key(one)] = StorageWeakRef(storage)
        return result


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class MemorySaver:
    """The name SGLang uses: ``torch_memory_saver.torch_memory_saver``."""

    enabled = True
    hook_mode: str | None = None

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    @contextmanager
    def region(
        self, tag: str = "default", enable_cpu_backup: bool = False, **options: Any
    ) -> Iterator[None]:
        if self.hook_mode == "torch":
            atexit.unregister(_die_at_exit)
            atexit.register(_die_at_exit)
        recorder = _Recorder()
        try:
            with recorder:
                yield
        finally:
            for reference in recorder.storages.values():
                if not reference.expired():
                    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                    self._blocks.append(Block(storage, tag, enable_cpu_backup))
            self._report()

    def pause(self, tag: str | None = None) -> None:
        for block in self.blocks(tag):
            if block.is_paused:
                _die(f"cannot pause {block.tag}: it is paused")
            block.pause()
        self._report()

    def resume(self, tag: str | None = None) -> None:
        for block in self.blocks(tag):
            if not block.is_paused:
                _die(f"cannot resume {block.tag}: it is not paused")
            block.resume()
        self._report()

    def _report(self) -> None:
        """Write what is not paused, where a double of NVML reads it."""
        held = sum(block.held_bytes for block in self.blocks(None))
        for gpu in _gpus():
            new = gpu / f"{os.getpid()}.new"
            new.write_text(str(held))
            new.rename(gpu / str(os.getpid()))

    @contextmanager
    def cuda_graph(self, **options: Any) -> Iterator[None]:
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        yield

    def blocks(self, tag: str | None) -> list[Block]:
        """Those of a tag, or all."""
        self._blocks = [block for block in self._blocks if not block.is_freed()]
        return [block for block in self._blocks if tag in (None, block.tag)]


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """The real one preloads its library into children started here."""
    yield


def _gpus() -> list[Path]:
    """The folders of the GPUs that this process sees; none where its regions are host memory."""
    if "NVML_DOUBLE" not in os.environ:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = Path(os.environ["NVML_DOUBLE"]).iterdir()
    return [gpu for gpu in gpus if gpu.name.partition("_")[0] in visible]


def _die_at_exit() -> None:
    sys.stdout.flush()
    _die("cannot free at exit in mode torch")


def _check(status: int) -> None:
    if status:
        error = ctypes.get_errno()
        _die(f"system call failed: {os.strerror(error)}")


def _die(reason: str) -> NoReturn:
    print(f"torch_memory_saver (CPU): {reason}", file=sys.stderr, flush=True)
    os._exit(1)


torch_memory_saver = MemorySaver()
