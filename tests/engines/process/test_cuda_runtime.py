"""The CUDA runtime on the loader's path, for a library that is preloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from engines.process.cuda_runtime import LIBRARY_PATH, runtime_text, with_runtime
from engines.protocol.spec import EngineSpec
from engines.sglang.environment import build_environment
from engines.sglang.parallel import Parallel
from tests.support.cuda_wheels import CudaWheels

NEEDS_CC = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
# Of no CUDA that there is, so no machine has it elsewhere.
MAJOR = 99


@pytest.mark.parametrize(
    ("cuda", "wheel"), [("13.0", "cu13"), ("12.8", "cuda_runtime"), ("11.8", ""), ("", "")]
)
def test_the_runtime_is_the_one_of_the_interpreters_torch(
    tmp_path: Path, cuda: str, wheel: str
) -> None:
    wheels = CudaWheels(tmp_path, cuda)
    wheels.add("cu13", 13)
    wheels.add("cuda_runtime", 12)
    (wheels.site_packages / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
    folder = str(wheels.site_packages / "nvidia" / wheel / "lib")
    assert with_runtime({"A": "b"}, wheels.python) == (
        {"A": "b", LIBRARY_PATH: folder} if wheel else {"A": "b"}
    )


def test_the_users_own_folders_come_first(tmp_path: Path) -> None:
    wheels = CudaWheels(tmp_path, "13.0")
    folder = wheels.add("cu13", 13).parent
    env = with_runtime({LIBRARY_PATH: "/own:/more"}, wheels.python)
    assert env == {LIBRARY_PATH: f"/own:/more:{folder}"}
    # An empty part would be the working directory.
    assert with_runtime({LIBRARY_PATH: ""}, wheels.python) == {LIBRARY_PATH: str(folder)}


def test_this_interpreter_has_that_of_its_own_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = CudaWheels(tmp_path, "13.0")
    folder = wheels.add("cu13", 13).parent
    monkeypatch.syspath_prepend(str(wheels.site_packages))
    assert with_runtime({}, "") == {LIBRARY_PATH: str(folder)}


def test_an_interpreter_without_torch_has_none(tmp_path: Path) -> None:
    assert with_runtime({"A": "b"}, str(tmp_path / "bin" / "python")) == {"A": "b"}


@NEEDS_CC
def test_a_preloaded_library_starts_with_the_runtime_of_pip_only_by_the_environment(
    tmp_path: Path,
) -> None:
    """The memory saver's, in the scheduler of an SGLang server."""
    wheels = CudaWheels(tmp_path, f"{MAJOR}.0")
    _, saver = wheels.compile(f"cu{MAJOR}", MAJOR)
    spec = EngineSpec("e-0", "sglang", "/no", "/e.log", gpu_ids=(0,), python=wheels.python)
    env = build_environment(spec, {"PATH": os.environ["PATH"]}, Parallel(1, {}))

    def start(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["true"], env=env | {"LD_PRELOAD": str(saver)}, capture_output=True, text=True
        )

    without = start({name: value for name, value in env.items() if name != LIBRARY_PATH})
    assert without.returncode == 127
    assert f"libcudart.so.{MAJOR}" in without.stderr
    assert (start(env).returncode, start(env).stderr) == (0, "")


@NEEDS_CC
def test_the_runtime_that_the_loader_finds_is_named(tmp_path: Path) -> None:
    wheels = CudaWheels(tmp_path, f"{MAJOR}.0")
    file, _ = wheels.compile(f"cu{MAJOR}", MAJOR)
    assert runtime_text(wheels.python) == f"{file}, for {wheels.python}"


@pytest.mark.parametrize(
    ("major", "wheel"), [(MAJOR, "nvidia-cuda-runtime"), (12, "nvidia-cuda-runtime-cu12")]
)
def test_a_runtime_that_the_loader_does_not_find_is_named_with_its_wheel(
    tmp_path: Path, major: int, wheel: str
) -> None:
    wheels = CudaWheels(tmp_path, f"{major}.0")
    if major != MAJOR:
        wheels.add("cuda_runtime", major)  # found, and no library
    text = runtime_text(wheels.python)
    assert text.startswith(f"none: the loader finds no libcudart.so.{major} for {wheels.python}")
    assert f"pip install {wheel} there, or set {LIBRARY_PATH}" in text


def test_an_interpreter_that_cannot_be_asked_is_no_missing_runtime(tmp_path: Path) -> None:
    wheels = CudaWheels(tmp_path, "13.0")
    program = Path(wheels.python)
    program.write_text("#!/bin/sh\nexit 3\n")
    assert runtime_text(wheels.python) == f"unknown: {program} ended with status 3"
    program.unlink()
    assert runtime_text(wheels.python).startswith(f"unknown: {program} does not answer: ")


def test_a_torch_without_cuda_has_no_runtime(tmp_path: Path) -> None:
    wheels = CudaWheels(tmp_path, "")
    assert runtime_text(wheels.python) == f"none: {wheels.python} has no torch, or one without CUDA"
