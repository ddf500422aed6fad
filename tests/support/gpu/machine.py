"""The GPU of a test, or a logical one on the CPU: so a test of GPUs runs without any.

On a logical GPU the memory saver is the one of ``tools/cpu_engines``, NVML is a double, and
sizes are a thousandth: what a test calls a GiB is a MiB there.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engines.process.gpu_memory import gpu_memory
from engines.protocol import GpuId
from rollout.runtime.local import visible_gpus
from tests.support.nvml import logical_gpus
from tests.support.processes import importing_us, wait_until

# clock: a driver frees memory in pieces, and does not say when it has.

ROOT = Path(__file__).parents[3]
PROGRAM_TIMEOUT_S = 120.0
_LOGICAL_BYTES = 1 << 30
# NVML counts some memory of the driver as used, which CUDA counts neither as used nor as free.
_LOGICAL_RESERVE_BYTES = 600 << 10
_CONTROL_BYTES = 4 << 20
COUNTER_FILES = "torch_{pid}_*"
"""In /dev/shm: torch's counters of the CUDA IPC handles that a process has made."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        device: torch's name of where its memory is: ``cuda``, or ``cpu`` for a logical one.
        gpu_id: its number, or its UUID where ``CUDA_VISIBLE_DEVICES`` names that.
        gib: bytes that count as a GiB.
    """

    device: str
    gpu_id: GpuId
    gib: int

    @property
    def is_real(self) -> bool:
        return self.device == "cuda"

    @property
    def uuid(self) -> str:
        return _measured(self.gpu_id)[0]

    def used_bytes(self) -> int:
        """What NVML says that all programs use on it."""
        return _measured(self.gpu_id)[1]

    def free_bytes(self) -> int:
        return _measured(self.gpu_id)[2]

    def need_free(self, num_gib: float) -> int:
        """So many GiB in bytes; the test is skipped where there is not as much free."""
        wanted = int(num_gib * self.gib)
        if self.free_bytes() < wanted:
            pytest.skip(f"GPU {self.uuid} has {self.free_bytes()} bytes free, not {wanted}")
        return wanted

    def settle(self) -> int:
        """Used bytes once they have stopped falling: a driver frees what ended in pieces."""
        before = self.used_bytes()
        while True:
            time.sleep(0.2)
            now = self.used_bytes()
            if now >= before:
                return now
            before = now


def _measured(gpu_id: GpuId) -> tuple[str, int, int]:
    found = gpu_memory([gpu_id])
    assert found, f"NVML does not measure GPU {gpu_id!r}"
    return found[0].uuid, found[0].used_bytes, found[0].free_bytes


@contextmanager
def the_gpu(device: str, folder: Path) -> Iterator[Gpu]:
    """The first GPU of this machine, or a logical one."""
    if device == "cpu":
        with logical_gpus(folder, 1, _LOGICAL_BYTES) as double:
            double.hold(0, _LOGICAL_RESERVE_BYTES)
            yield Gpu("cpu", 0, 1 << 20)
        return
    import torch

    # No skip: a run for the GPU that could not use it must not look like one that did.
    if not torch.cuda.is_available():
        pytest.fail("no CUDA device: torch.cuda.is_available() is False", pytrace=False)
    gpus = visible_gpus()
    if not gpus or gpu_memory(gpus[:1]) is None:
        pytest.fail("NVML does not measure this machine's GPUs", pytrace=False)
    yield Gpu("cuda", gpus[0], 1 << 30)
    collect_handles(torch.cuda.ipc_collect)


def collect_handles(
    collect: Callable[[], object], *, timeout_s: float = 20.0, folder: Path = Path("/dev/shm")
) -> None:
    """Wait until no process uses memory of this one any more, and torch's counters of it are gone.

    Args:
        collect: ``torch.cuda.ipc_collect``; without it torch keeps the file to the process's end.
    """

    def left() -> list[str]:
        gc.collect()
        collect()
        return sorted(path.name for path in folder.glob(COUNTER_FILES.format(pid=os.getpid())))

    if not wait_until(lambda: not left(), timeout_s):
        pytest.fail(f"a process still uses memory of this one: {folder}: {left()}", pytrace=False)


def need(package: str, gpu: Gpu) -> None:
    """Skip where a package that a real GPU needs is not installed."""
    if gpu.is_real and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def program(name: str, *arguments: str, stdin: Any = None, **env: str) -> subprocess.Popen[str]:
    """A program of ``tests/support/gpu`` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.support.gpu.{name}", *arguments],
        cwd=ROOT,
        env=importing_us(CUDA_DEVICE_ORDER="PCI_BUS_ID", **env),
        stdin=subprocess.PIPE if stdin is None else stdin,
        stdout=subprocess.PIPE,
        text=True,
    )


def report_of(name: str, *arguments: str, **env: str) -> Any:
    """What such a program printed as JSON; it must end with status 0."""
    with program(name, *arguments, stdin=subprocess.DEVNULL, **env) as process:
        try:
            text, _ = process.communicate(timeout=PROGRAM_TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 0, f"{name} ended with status {process.returncode}"
    return json.loads(text.splitlines()[-1])


class Holder:
    """Another process that holds memory of the GPU."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the holder ended with status {process.wait()}: too little memory?"
        self.report: dict[str, Any] = json.loads(line)

    def end(self) -> None:
        """Let it give the memory back and end."""
        if self.process.poll() is None:
            self.process.communicate(timeout=PROGRAM_TIMEOUT_S)
            assert self.process.returncode in (0, -signal.SIGKILL)


@contextmanager
def holder(gpu: Gpu, num_bytes: int, pinned_bytes: int = 0, **env: str) -> Iterator[Holder]:
    """A process that holds so much of the GPU, and so much pinned memory of the host."""
    arguments = gpu.device, str(gpu.gpu_id), str(num_bytes), str(pinned_bytes)
    process = program("holder", *arguments, **env)
    try:
        held = Holder(process)
        yield held
        held.end()
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def timed(work: Callable[[], Any]) -> float:
    """Seconds that ``work`` takes, including the work that it queued on the GPU."""
    import torch

    synchronize: Callable[[], Any] = (
        torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    )
    synchronize()
    started = time.monotonic()
    work()
    synchronize()
    return time.monotonic() - started


def copied_to_host(work: Callable[[], Any], trace: Path) -> tuple[int, float]:
    """Bytes that ``work`` copied from the GPU to the host, in all threads, and seconds.

    Args:
        trace: file for what torch's profiler has seen.  It must have seen a copy of a known size.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    control = torch.ones(_CONTROL_BYTES, dtype=torch.uint8, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        control.cpu()
        seconds = timed(work)
    profiler.export_chrome_trace(str(trace))
    copied = bytes_to_host(json.loads(trace.read_text()))
    assert copied >= _CONTROL_BYTES, f"the profiler saw {copied} of {_CONTROL_BYTES} bytes"
    return copied - _CONTROL_BYTES, seconds


def bytes_to_host(trace: Mapping[str, Any]) -> int:
    """Bytes of all copies from a GPU to the host in a Chrome trace of torch's profiler."""
    events = trace["traceEvents"]
    copies = [one for one in events if one.get("name", "").startswith("Memcpy DtoH")]
    return sum(one["args"]["bytes"] for one in copies)


def devices(*, cpu: Sequence[pytest.MarkDecorator] = ()) -> list[Any]:
    """Parameters of a test: a logical GPU without ``-m gpu``, a real one with it.

    Args:
        cpu: marks of the tests on a logical GPU.
    """
    real = [pytest.mark.gpu, pytest.mark.timeout(200)]
    return [pytest.param("cpu", marks=cpu), pytest.param("cuda", marks=real)]


with_engines = pytest.mark.parametrize(
    "gpu", devices(cpu=[pytest.mark.slow]), indirect=True, scope="module"
)
"""For a module whose tests start engines or other large processes, which takes seconds each."""
