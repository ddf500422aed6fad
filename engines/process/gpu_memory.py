"""Memory and use of this machine's GPUs, read with NVML.

NVML needs no CUDA context, so reading takes no memory on the GPU.  It reports what all programs
use together: per-process figures are those of the host's pids, which a container cannot match.

Always true: without NVML, its library or a GPU that it knows, the memory counts as not measured,
and nothing fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from engines.protocol import GpuId, GpuMemory
from engines.protocol.errors import EngineHung

logger = logging.getLogger(__name__)

_POLL_S = 0.2
# A driver gives memory back in pieces, with pauses, and in a container it does not say whose it is.
_STEADY_S = 3.0
# A driver may keep a little of a process that has ended.
_SLACK_BYTES = 256 << 20


def gpu_memory(
    gpu_ids: Sequence[GpuId], pids: Collection[int] = ()
) -> tuple[GpuMemory, ...] | None:
    """Memory of these GPUs, in their order, or None if one of them cannot be measured.

    Args:
        gpu_ids: of this machine; ``CUDA_VISIBLE_DEVICES`` does not matter.
        pids: of the engine on them, for ``own_bytes``.
    """
    nvml, why_not = _nvml()
    if nvml is None:
        _warn(why_not)
        return None
    try:
        return tuple(_read(nvml, _find(nvml, gpu_id), pids) for gpu_id in gpu_ids)
    except nvml.NVMLError as error:
        logger.warning("memory of GPUs %s is not measured: %s", list(gpu_ids), error)
        return None


async def wait_until_free(
    gpu_ids: Sequence[GpuId],
    pids: Collection[int],
    timeout_s: float,
    used_before: int | None = None,
) -> None:
    """Returns when these GPUs have back what processes that have ended held on them.

    That is when the driver names none of the processes any more, and no more is used than before
    they started.  Programs beside them may have taken more since: then it is when the used memory
    has not fallen for three seconds.  At once if it is not measured.

    Args:
        pids: processes of an engine, all of which have ended.
        used_before: bytes on these GPUs together before they started, or None if not measured.

    Raises:
        EngineHung: the driver still names one of them.
    """
    deadline = time.monotonic() + timeout_s
    steady_s = 0.0 if used_before is None else _STEADY_S
    least: int | None = None
    fell_at = time.monotonic()
    while (found := await asyncio.to_thread(gpu_memory, gpu_ids)) is not None:
        used = sum(gpu.used_bytes for gpu in found)
        names = [name for gpu in found for name in gpu.holders if _pid_of(name) in pids]
        now = time.monotonic()
        is_back = used_before is not None and used <= used_before + _SLACK_BYTES
        is_steady = least is not None and used >= least and now - fell_at >= steady_s
        if not names and (is_back or is_steady):
            return
        if least is None or used < least:
            least, fell_at = used, now
        if time.monotonic() >= deadline:
            if names:
                raise EngineHung(
                    f"GPUs {', '.join(gpu.uuid for gpu in found)}: {', '.join(names)} ended and "
                    f"still holds memory there after {timeout_s:g} s",
                    operation="kill",
                    budget_s=timeout_s,
                )
            return  # what others do there does not end
        await asyncio.sleep(_POLL_S)


def _pid_of(holder: str) -> int:
    return int(holder.split()[1])


def memory_of_all_gpus() -> tuple[Sequence[GpuMemory], str]:
    """Memory of the GPUs of this machine, and why that of the others, or of all, is not measured,
    or empty if it is."""
    nvml, why_not = _nvml()
    if nvml is None:
        _warn(why_not)
        return (), why_not
    try:
        num_gpus = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return (), str(error)
    measured, lost = [], []
    for index in range(num_gpus):
        try:
            measured.append(_read(nvml, _find(nvml, index)))
        except nvml.NVMLError as error:  # it may have fallen off its bus
            lost.append(f"GPU {index}: {error}")
    return tuple(measured), "; ".join(lost)


def number_of_gpus() -> int:
    """GPUs of this machine; 0 if it has none, or no NVML."""
    nvml, _ = _nvml()
    try:
        return int(nvml.nvmlDeviceGetCount()) if nvml is not None else 0
    except nvml.NVMLError:
        return 0


def _find(nvml: Any, gpu_id: GpuId) -> Any:
    if isinstance(gpu_id, int):
        return nvml.nvmlDeviceGetHandleByIndex(gpu_id)
    return nvml.nvmlDeviceGetHandleByUUID(gpu_id)


def _read(nvml: Any, handle: Any, pids: Collection[int] = ()) -> GpuMemory:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    uuid = nvml.nvmlDeviceGetUUID(handle)
    holders = _holders(nvml, handle)
    own = [held for name, held in holders.items() if _pid_of(name) in pids]
    own_bytes = None if None in own or not own else sum(held or 0 for held in own)
    busy = _busy_percent(nvml, handle)
    return GpuMemory(uuid, memory.used, memory.total, holders, busy, own_bytes)


def _busy_percent(nvml: Any, handle: Any) -> int | None:
    """None if the driver does not measure it, as for MIG slices."""
    try:
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:
        return None


def _holders(nvml: Any, handle: Any) -> dict[str, int | None]:
    """The programs on a GPU, or empty if the driver does not name them, as in many containers."""
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return {}
    return {
        f"pid {process.pid} ({_name_of(nvml, process.pid)})": process.usedGpuMemory
        for process in processes
        if process.usedGpuMemory != 0
    }


def _name_of(nvml: Any, pid: int) -> str:
    """Name of a program; one that has just ended has none, and its memory is still counted."""
    try:
        return Path(nvml.nvmlSystemGetProcessName(pid)).name
    except (nvml.NVMLError, UnicodeDecodeError):
        return "unknown"


@cache
def _nvml() -> tuple[Any, str]:
    """The library, ready for calls; or None, and why this machine has none."""
    try:
        import pynvml  # the package nvidia-ml-py
    except ImportError as error:
        return None, f"{error} (pip install nvidia-ml-py)"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, str(error)
    return pynvml, ""


@cache
def _warn(why: str) -> None:
    logger.warning("GPU memory is not measured: %s", why)
