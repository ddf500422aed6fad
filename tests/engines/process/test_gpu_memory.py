"""GPU memory by NVML: by index and by UUID, with its holders, or not measured."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engines.launch import LocalLauncher
from engines.process import gpu_memory as measured
from engines.process.gpu_memory import gpu_memory, memory_of_all_gpus, wait_until_free
from engines.protocol import GpuId, GpuMemory
from engines.protocol.errors import EngineHung
from engines.protocol.spec import EngineSpec
from tests.support.nvml import DOUBLE, NvmlDouble, nvml_double

GIB = 1 << 30


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlDouble]:
    with nvml_double(tmp_path / "gpus") as double:
        double.add(0, "GPU-aaa", 80 * GIB)
        double.add(1, "GPU-bbb", 80 * GIB, busy_percent=63)
        double.add(2, "MIG-ccc", 10 * GIB)
        yield double


def test_gpus_are_found_by_index_and_by_uuid_in_the_order_given(nvml: NvmlDouble) -> None:
    nvml.hold(1, 30 * GIB)
    found = gpu_memory([1, "MIG-ccc", 0])
    assert found is not None
    assert [(gpu.uuid, gpu.used_bytes, gpu.free_bytes) for gpu in found] == [
        ("GPU-bbb", 30 * GIB, 50 * GIB),
        ("MIG-ccc", 0, 10 * GIB),
        ("GPU-aaa", 0, 80 * GIB),
    ]


def test_the_use_of_a_gpu_is_measured_where_the_driver_does(nvml: NvmlDouble) -> None:
    found = gpu_memory([1, "MIG-ccc"])
    assert found is not None
    assert [gpu.busy_percent for gpu in found] == [63, None]


def test_all_gpus_of_a_machine_are_found_or_the_reason_is_given(
    nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, why_not = memory_of_all_gpus()
    assert ([gpu.uuid for gpu in gpus], why_not) == (["GPU-aaa", "GPU-bbb", "MIG-ccc"], "")
    measured._nvml.cache_clear()
    monkeypatch.delenv("NVML_DOUBLE")
    assert memory_of_all_gpus() == ((), "NVML Shared Library Not Found")


def test_a_gpu_that_is_lost_hides_no_other(nvml: NvmlDouble) -> None:
    nvml.hold(2, 3 * GIB)
    nvml.lose(1)
    gpus, why_not = memory_of_all_gpus()
    assert [(gpu.uuid, gpu.used_bytes) for gpu in gpus] == [("GPU-aaa", 0), ("MIG-ccc", 3 * GIB)]
    assert why_not == "GPU 1: GPU is lost"


def test_an_engine_on_a_gpu_that_is_lost_is_not_measured(
    nvml: NvmlDouble, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.lose(1)
    assert gpu_memory([0, 1]) is None
    assert "memory of GPUs [0, 1] is not measured: GPU is lost" in caplog.text
    assert gpu_memory([0]) is not None


def test_holders_are_named(nvml: NvmlDouble) -> None:
    nvml.hold(0, 7 * GIB)
    assert gpu_memory([0]) == (
        GpuMemory("GPU-aaa", 7 * GIB, 80 * GIB, {f"pid {os.getpid()} ({executable()})": 7 * GIB}),
    )


def test_an_engines_own_memory_is_that_of_its_processes(nvml: NvmlDouble) -> None:
    nvml.hold(0, 7 * GIB)
    assert [gpu.own_bytes for gpu in gpu_memory([0, 1], {os.getpid(), 1}) or ()] == [7 * GIB, None]
    assert [gpu.own_bytes for gpu in gpu_memory([0], {1}) or ()] == [None]


@pytest.fixture
def ended_pid() -> int:
    """The pid of a process that has ended, so its name cannot be read."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_process_that_has_just_ended_hides_no_other(nvml: NvmlDouble, ended_pid: int) -> None:
    nvml.hold(0, 7 * GIB)
    nvml.keep(0, 2 * GIB, ended_pid)
    (gpu,) = gpu_memory([0], {os.getpid()}) or ()
    assert gpu.holders == {
        f"pid {os.getpid()} ({executable()})": 7 * GIB,
        f"pid {ended_pid} (unknown)": 2 * GIB,
    }
    assert (gpu.used_bytes, gpu.own_bytes) == (9 * GIB, 7 * GIB)
    (gpu,) = gpu_memory([0], {os.getpid(), ended_pid}) or ()
    assert gpu.own_bytes == 9 * GIB


def test_a_name_that_is_no_text_hides_nothing(
    nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pynvml decodes names, and a file's name need not be UTF-8."""
    nvml.hold(0, 7 * GIB)
    monkeypatch.setattr("pynvml.nvmlSystemGetProcessName", lambda pid: b"\xff".decode())
    (gpu,) = gpu_memory([0], {os.getpid()}) or ()
    assert gpu.holders == {f"pid {os.getpid()} (unknown)": 7 * GIB}
    assert gpu.own_bytes == 7 * GIB


def test_a_holder_of_an_unknown_number_of_bytes_is_one(nvml: NvmlDouble) -> None:
    nvml.hold(0, None)
    nvml.hold(0, 3 * GIB, 1)
    (gpu,) = gpu_memory([0], {os.getpid(), 1}) or ()
    assert gpu.holders[f"pid {os.getpid()} ({executable()})"] is None
    assert gpu.own_bytes is None, "a part of it is not measured"
    (gpu,) = gpu_memory([0], {1}) or ()
    assert gpu.own_bytes == 3 * GIB


def test_what_a_process_held_is_free_once_it_has_ended(nvml: NvmlDouble) -> None:
    process = subprocess.Popen(["sleep", "60"])
    nvml.hold(0, 7 * GIB, process.pid)
    (before,) = gpu_memory([0]) or ()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
    (after,) = gpu_memory([0]) or ()
    process.wait()
    assert (before.used_bytes, after.used_bytes) == (7 * GIB, 0)


@pytest.mark.parametrize("gpu_id", [7, "GPU-zzz"])
def test_a_gpu_that_nvml_does_not_know_is_not_measured(
    nvml: NvmlDouble, gpu_id: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    assert gpu_memory([0, gpu_id]) is None
    assert f"memory of GPUs [0, {gpu_id!r}] is not measured" in caplog.text


def test_without_a_driver_nothing_is_measured(
    nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NVML_DOUBLE")
    assert gpu_memory([0]) is None
    assert "GPU memory is not measured: NVML Shared Library Not Found" in caplog.text


def test_without_the_package_nothing_is_measured(
    nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_memory([0]) is None
    assert "pip install nvidia-ml-py" in caplog.text


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that holds memory until it is killed."""
    started = subprocess.Popen(["sleep", "60"])
    yield started
    started.kill()
    started.wait()


async def test_a_kill_is_done_when_the_driver_names_the_process_no_more(
    nvml: NvmlDouble, process: subprocess.Popen[bytes]
) -> None:
    nvml.hold(0, 7 * GIB, process.pid)
    waiting = asyncio.ensure_future(wait_until_free([0], {process.pid}, 30))
    _, pending = await asyncio.wait([waiting], timeout=0.7)
    assert pending, "it holds memory all the time"
    process.kill()
    process.wait()
    await waiting


async def test_a_kill_waits_for_memory_of_a_process_that_has_ended_and_has_no_name(
    nvml: NvmlDouble, ended_pid: int
) -> None:
    kept = nvml.keep(0, 7 * GIB, ended_pid)
    with pytest.raises(EngineHung, match=rf"pid {ended_pid} \(unknown\) ended and still holds"):
        await wait_until_free([0], {ended_pid}, 0.3)
    kept.unlink()
    await wait_until_free([0], {ended_pid}, 30)


async def test_a_kill_waits_for_a_holder_of_an_unknown_number_of_bytes(nvml: NvmlDouble) -> None:
    nvml.hold(0, None)
    with pytest.raises(EngineHung, match=rf"pid {os.getpid()} .* ended and still holds"):
        await wait_until_free([0], {os.getpid()}, 0.3)


async def test_memory_that_the_driver_never_gives_back_is_an_error(nvml: NvmlDouble) -> None:
    nvml.hold(1, 7 * GIB)
    with pytest.raises(EngineHung, match=rf"GPUs GPU-bbb: pid {os.getpid()} .* after 0.3 s"):
        await wait_until_free([1], {os.getpid()}, 0.3)


async def test_what_others_hold_does_not_keep_a_kill_waiting(nvml: NvmlDouble) -> None:
    nvml.hold(0, 7 * GIB)
    await asyncio.wait_for(wait_until_free([0], {1}, 30), 10)


async def test_a_driver_that_pauses_while_it_frees_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a container it names no process, and the next start needs the memory."""
    readings = [80 * GIB, 80 * GIB, 80 * GIB, 30 * GIB, 30 * GIB, 10 * GIB]

    def read(gpu_ids: Sequence[GpuId]) -> tuple[GpuMemory, ...]:
        return (GpuMemory("GPU-aaa", readings.pop(0), 80 * GIB),)

    monkeypatch.setattr(measured, "gpu_memory", read)
    await wait_until_free([0], {1}, 30, used_before=10 * GIB)
    assert not readings


async def test_what_a_trainer_took_since_the_start_does_not_keep_a_kill_waiting(
    nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "_STEADY_S", 0.5)
    nvml.hold(0, 7 * GIB)
    await asyncio.wait_for(wait_until_free([0], {1}, 30, used_before=0), 10)


async def test_a_launched_engine_is_gone_when_its_gpu_is_as_before_it_started(
    nvml: NvmlDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.hold(0, 7 * GIB)
    spec = EngineSpec("main-0", "fake", "/nowhere", str(tmp_path / "log"), gpu_ids=(0,))
    engine = await LocalLauncher().launch(spec)
    readings = [9 * GIB, 9 * GIB, 9 * GIB, 7 * GIB]

    def read(gpu_ids: Sequence[GpuId]) -> tuple[GpuMemory, ...]:
        return (GpuMemory("GPU-aaa", readings.pop(0), 80 * GIB),)

    monkeypatch.setattr(measured, "gpu_memory", read)
    await engine.kill()
    assert not readings


async def test_without_nvml_a_kill_does_not_wait_for_memory(
    nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    await asyncio.wait_for(wait_until_free([0], {os.getpid()}, 30), 0.5)


async def test_an_engine_that_was_killed_has_given_its_gpu_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = EngineSpec("main-0", "fake", "/nowhere", str(tmp_path / "log"), gpu_ids=(0,))
    engine = await LocalLauncher().launch(spec)
    readings = [8 * GIB, 6 * GIB, 3 * GIB, 2 * GIB, 2 * GIB]  # it is freed bit by bit

    def read(gpu_ids: Sequence[GpuId]) -> tuple[GpuMemory, ...]:
        return (GpuMemory("GPU-aaa", readings.pop(0), 80 * GIB),)

    monkeypatch.setattr(measured, "gpu_memory", read)
    await engine.kill()
    assert not readings
    assert not await engine.is_alive()


def test_the_double_has_the_names_of_the_library() -> None:
    spec = importlib.util.find_spec("pynvml")
    assert spec is not None, "nvidia-ml-py is a dependency"
    assert spec.origin is not None
    library = _functions(Path(spec.origin))
    double = _functions(DOUBLE / "pynvml.py")
    called = {name for name in double if f".{name}(" in inspect.getsource(measured)}
    assert called >= {"nvmlInit", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID"}
    assert {name: library[name][: len(double[name])] for name in called} == {
        name: double[name] for name in called
    }


def _functions(path: Path) -> dict[str, list[str]]:
    """Functions of a module and the names of their arguments."""
    return {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def executable() -> str:
    return Path(os.readlink("/proc/self/exe")).name
