"""GPUs that NVML reports here, without a GPU: see ``nvml_double/pynvml.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.process import gpu_memory
from tools.cpu_engines.install import MEMORY_SAVER

DOUBLE = Path(__file__).parent / "nvml_double"


class NvmlDouble:
    """The GPUs of one test, also for the processes that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, index: int, uuid: str, total_bytes: int, busy_percent: int | None = None) -> None:
        gpu = self.folder / f"{index}_{uuid}"
        gpu.mkdir()
        (gpu / "total").write_text(str(total_bytes))
        if busy_percent is not None:
            (gpu / "busy").write_text(str(busy_percent))

    def used_bytes(self, index: int = 0) -> int:
        """What NVML says is in use on a GPU."""
        (gpu,) = gpu_memory.gpu_memory([index]) or ()
        return gpu.used_bytes

    def hold(self, index: int, num_bytes: int | None, pid: int | None = None) -> None:
        """Let a process, this one by default, hold so much on a GPU; None: the driver does not
        say how much."""
        content = "N/A" if num_bytes is None else str(num_bytes)
        (self._gpu(index) / str(pid or os.getpid())).write_text(content)

    def keep(self, index: int, num_bytes: int, pid: int) -> Path:
        """Let the driver still name a process that has ended; until the file is removed."""
        file = self._gpu(index) / f"{pid}.ended"
        file.write_text(str(num_bytes))
        return file

    def lose(self, index: int) -> None:
        """Let a GPU be lost, as one that has fallen off its bus."""
        (self._gpu(index) / "lost").touch()

    def _gpu(self, index: int) -> Path:
        (gpu,) = self.folder.glob(f"{index}_*")
        return gpu


@contextmanager
def nvml_double(folder: Path) -> Iterator[NvmlDouble]:
    """NVML with the GPUs that are added, in this process and in those it starts."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "pynvml", raising=False)
        patch.syspath_prepend(str(DOUBLE))
        inherited = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", f"{DOUBLE}{os.pathsep}{inherited}".rstrip(os.pathsep))
        patch.setenv("NVML_DOUBLE", str(folder))
        gpu_memory._nvml.cache_clear()
        gpu_memory._warn.cache_clear()
        try:
            yield NvmlDouble(folder)
        finally:
            sys.modules.pop("pynvml", None)
            gpu_memory._nvml.cache_clear()
            gpu_memory._warn.cache_clear()


def logical_gpu_environment(folder: Path) -> dict[str, str]:
    """What an engine needs to have its memory on the GPUs of this folder."""
    # The memory saver writes what it holds for the double.
    paths = [str(DOUBLE), str(MEMORY_SAVER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"NVML_DOUBLE": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def logical_gpus(folder: Path, num_gpus: int, total_bytes: int) -> Iterator[NvmlDouble]:
    """GPUs that engines can be started on: what they release there stays in the host's memory.

    SGLang's settings for CPUs have the memory saver; embedded engines find it by its path.
    """
    with nvml_double(folder) as double, pytest.MonkeyPatch.context() as patch:
        for index in range(num_gpus):
            double.add(index, f"GPU-{index:04d}", total_bytes)
        patch.setenv("PYTHONPATH", logical_gpu_environment(folder)["PYTHONPATH"])
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))
        yield double
