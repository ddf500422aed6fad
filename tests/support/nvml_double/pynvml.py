"""A double of ``pynvml`` (nvidia-ml-py): GPUs described by a folder instead of a driver.

The folder is named by ``NVML_DOUBLE``.  Each GPU is a folder in it, named ``<index>_<uuid>``, with
a file ``total``, one file of bytes for each process that holds memory, named by its pid, and one
``busy`` with a percentage if its use is measured.  One with a file ``lost`` is lost.
The bytes of a process are ``N/A`` where the driver does not say them.
A process that has ended holds nothing, as on a real GPU, unless its file is named ``<pid>.ended``:
the driver frees its memory a little later.  Names and errors are those of pynvml.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_GPU_IS_LOST = 15


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return {
            NVML_ERROR_INVALID_ARGUMENT: "Invalid Argument",
            NVML_ERROR_NOT_SUPPORTED: "Not Supported",
            NVML_ERROR_NOT_FOUND: "Not Found",
            NVML_ERROR_LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
            NVML_ERROR_GPU_IS_LOST: "GPU is lost",
        }[self.value]


@dataclass(frozen=True)
class Memory:
    total: int
    free: int
    used: int


@dataclass(frozen=True)
class Utilization:
    gpu: int
    memory: int


@dataclass(frozen=True)
class Process:
    pid: int
    usedGpuMemory: int | None


def nvmlInit() -> None:
    if "NVML_DOUBLE" not in os.environ:
        raise NVMLError(NVML_ERROR_LIBRARY_NOT_FOUND)


def nvmlDeviceGetCount() -> int:
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> Path:
    for gpu in _gpus():
        if gpu.name.startswith(f"{index}_"):
            return _present(gpu)
    raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)


def nvmlDeviceGetHandleByUUID(uuid: str) -> Path:
    for gpu in _gpus():
        if gpu.name.endswith(f"_{uuid}"):
            return _present(gpu)
    raise NVMLError(NVML_ERROR_NOT_FOUND)


def nvmlDeviceGetUUID(handle: Path) -> str:
    return handle.name.partition("_")[2]


def nvmlDeviceGetMemoryInfo(handle: Path) -> Memory:
    total = int((handle / "total").read_text())
    used = sum(process.usedGpuMemory or 0 for process in _processes(handle))
    return Memory(total, total - used, used)


def nvmlDeviceGetUtilizationRates(handle: Path) -> Utilization:
    try:
        return Utilization(int((handle / "busy").read_text()), 0)
    except FileNotFoundError:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED) from None


def nvmlDeviceGetComputeRunningProcesses(handle: Path) -> list[Process]:
    return _processes(handle)


def nvmlSystemGetProcessName(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        raise NVMLError(NVML_ERROR_NOT_FOUND) from None


def _gpus() -> list[Path]:
    return sorted(Path(os.environ["NVML_DOUBLE"]).iterdir())


def _present(gpu: Path) -> Path:
    if (gpu / "lost").exists():
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return gpu


def _processes(gpu: Path) -> list[Process]:
    return [
        Process(int(file.stem), _bytes_of(file))
        for file in gpu.iterdir()
        if file.stem.isdigit() and (file.suffix == ".ended" or _runs(file.stem))
    ]


def _bytes_of(file: Path) -> int | None:
    content = file.read_text() or "0"
    return None if content == "N/A" else int(content)


def _runs(pid: str) -> bool:
    """One that has ended holds nothing, also before its parent has asked for its status."""
    try:
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
