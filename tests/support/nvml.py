"""GPUs that NVML reports here, without a GPU: see ``nvml_double/pynvml.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.process import gpu_memory

DOUBLE = Path(__file__).parent / "nvml_double"


class NvmlDouble:
    """The GPUs of one test, also for the processes that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, index: int, uuid: str, total_bytes: int) -> None:
        gpu = self.folder / f"{index}_{uuid}"
        gpu.mkdir()
        (gpu / "total").write_text(str(total_bytes))

    def hold(self, index: int, num_bytes: int, pid: int | None = None) -> None:
        """Let a process, this one by default, hold so much on a GPU."""
        (gpu,) = self.folder.glob(f"{index}_*")
        (gpu / str(pid or os.getpid())).write_text(str(num_bytes))


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
        try:
            yield NvmlDouble(folder)
        finally:
            sys.modules.pop("pynvml", None)
            gpu_memory._nvml.cache_clear()
