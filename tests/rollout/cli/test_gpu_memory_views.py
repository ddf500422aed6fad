"""The memory of GPUs in what a user reads: doctor, reports of steps, the report of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollout.cli.main import app
from rollout.config.run_dir import RunFolder
from rollout.core.errors import ConfigError
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.nvml import NvmlDouble, nvml_double
from tests.support.paged import until
from tests.support.served_fakes import launched

GIB = 1 << 30
GROUPS = {"shared": {"num_engines": 1, "engine": {"kind": "fake", "gpus": 2}}}


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlDouble]:
    with nvml_double(tmp_path / "gpus") as double:
        double.add(0, "GPU-here", 80 * GIB)
        double.hold(0, 7 * GIB)
        yield double


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeploymentHandle]:
    """One fake engine on the GPUs 4 and 5 of some node."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with launched(launch_local, tmp_path, GROUPS) as handle:
        yield handle


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_doctor_shows_the_gpus_of_this_machine_and_of_each_engine(
    nvml: NvmlDouble, deployment: DeploymentHandle
) -> None:
    deployment["policy"].offload().result(30)
    run = str(RunFolder.of(deployment.config).path)
    (report,) = json.loads(shown("doctor", run, "--json"))
    assert [(gpu["uuid"], gpu["free_bytes"]) for gpu in report["gpus"]] == [("GPU-here", 73 * GIB)]
    assert [gpu["uuid"] for gpu in report["gpus_of_engines"]["shared-0"]] == ["GPU-4", "GPU-5"]
    text = shown("doctor", run)
    held = f"pid {os.getpid()} ("
    assert f"GPU-here: 7.00 GiB used, 73.00 GiB free, {held}" in text
    assert "engine shared-0: GPU-4: 0 B used, 6 KiB free; GPU-5: 0 B used" in text


def test_doctor_names_a_gpu_that_is_lost_and_holders_of_unknown_size(
    nvml: NvmlDouble, deployment: DeploymentHandle
) -> None:
    nvml.hold(0, None)
    nvml.add(1, "GPU-gone", 80 * GIB)
    nvml.lose(1)
    text = shown("doctor", str(RunFolder.of(deployment.config).path))
    assert "GPU-here: 0 B used, 80.00 GiB free, pid" in text
    assert ") holds memory\n" in text
    assert "not measured on this machine: GPU 1: GPU is lost" in text


def test_doctor_says_what_is_missing_where_nothing_is_measured(
    nvml: NvmlDouble, deployment: DeploymentHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVML_DOUBLE")
    run = str(RunFolder.of(deployment.config).path)
    text = shown("doctor", run)
    assert "not measured on this machine: NVML Shared Library Not Found" in text
    assert "engine shared-0: GPU-4" in text


def test_the_reports_show_what_is_in_use_on_the_gpus(
    deployment: DeploymentHandle, tmp_path: Path
) -> None:
    policy = deployment["policy"]
    released = policy.offload().result(30).reports[-1]
    (engine,) = released.engines
    assert (released.command, engine.num_gpus, engine.used_bytes) == (
        "release_memory_occupation",
        2,
        0,
    )
    assert engine.freed_bytes > 0
    out = tmp_path / "report.html"

    def is_written() -> bool:
        with suppress(ConfigError):  # spans are written a little later
            shown("report", str(RunFolder.of(deployment.config).path), "-o", str(out))
        return out.exists() and "<td>2 GPUs<td>" in out.read_text()

    until(is_written, "the release is in the report")
    assert f"<td>2 GPUs<td>{_size(engine.freed_bytes)}<td>0 B<td>" in out.read_text()


def _size(num_bytes: Any) -> str:
    return f"{num_bytes / 1024:.0f} KiB"
