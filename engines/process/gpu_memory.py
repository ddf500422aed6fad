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


def gpu_memory(gpu_ids: Sequence[GpuId]) -> tuple[GpuMemory, ...] | None:
    """Memory of these GPUs, in their order; None if one of them cannot be measured.

    Args:
        gpu_ids: of this machine; ``CUDA_VISIBLE_DEVICES`` does not matter.
    """
    nvml, _ = _nvml()
    if nvml is None:
        return None
    try:
        return tuple(_read(nvml, _find(nvml, gpu_id)) for gpu_id in gpu_ids)
    except nvml.NVMLError as error:
        logger.warning("memory of GPUs %s is not measured: %s", list(gpu_ids), error)
        return None


async def wait_until_free(
    gpu_ids: Sequence[GpuId], pids: Collection[int], timeout_s: float
) -> None:
    """Returns when these GPUs have back what processes that have ended held on them.

    That is when the driver names none of the processes any more, and the used memory falls no
    longer.  At once if it is not measured.

    Args:
        pids: processes of an engine, all of which have ended.

    Raises:
        EngineHung: the driver still names one of them.
    """
    deadline = time.monotonic() + timeout_s
    before: int | None = None
    while (found := await asyncio.to_thread(gpu_memory, gpu_ids)) is not None:
        used = sum(gpu.used_bytes for gpu in found)
        names = [name for gpu in found for name in gpu.holders if _pid_of(name) in pids]
        if not names and before is not None and used >= before:
            return
        if time.monotonic() >= deadline:
            if names:
                raise EngineHung(
                    f"GPUs {', '.join(gpu.uuid for gpu in found)}: {', '.join(names)} ended and "
                    f"still holds memory there after {timeout_s:g} s",
                    operation="kill",
                    budget_s=timeout_s,
                )
            return  # what others do there does not end
        before = used
        await asyncio.sleep(_POLL_S)


def _pid_of(holder: str) -> int:
    return int(holder.split()[1])


def memory_of_all_gpus() -> tuple[Sequence[GpuMemory], str]:
    """Memory of all GPUs of this machine, and why it is not measured; empty if it is."""
    nvml, why_not = _nvml()
    if nvml is None:
        return (), why_not
    try:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return tuple(_read(nvml, handle) for handle in handles), ""
    except nvml.NVMLError as error:
        return (), str(error)


def _find(nvml: Any, gpu_id: GpuId) -> Any:
    if isinstance(gpu_id, int):
        return nvml.nvmlDeviceGetHandleByIndex(gpu_id)
    return nvml.nvmlDeviceGetHandleByUUID(gpu_id)


def _read(nvml: Any, handle: Any) -> GpuMemory:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return GpuMemory(
        uuid, memory.used, memory.total, _holders(nvml, handle), _busy_percent(nvml, handle)
    )


def _busy_percent(nvml: Any, handle: Any) -> int | None:
    """None if the driver does not measure it, as for MIG slices."""
    try:
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:
        return None


def _holders(nvml: Any, handle: Any) -> dict[str, int]:
    """The programs on a GPU; empty if the driver does not name them, as in many containers."""
    try:
        return {
            f"pid {process.pid} ({Path(nvml.nvmlSystemGetProcessName(process.pid)).name})": held
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            if (held := process.usedGpuMemory)
        }
    except nvml.NVMLError:
        return {}


@cache
def _nvml() -> tuple[Any, str]:
    """The library, ready for calls; or None, and why this machine has none."""
    try:
        import pynvml  # the package nvidia-ml-py
    except ImportError as error:
        return _missing(f"{error} (pip install nvidia-ml-py)")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _missing(str(error))
    return pynvml, ""


def _missing(why: str) -> tuple[None, str]:
    logger.warning("GPU memory is not measured: %s", why)
    return None, why
