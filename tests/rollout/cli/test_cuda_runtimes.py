"""The CUDA runtime that the memory saver of a group would find, in ``rollout doctor``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engines import kinds
from rollout.cli.doctor import cuda_runtimes
from rollout.cli.main import app
from rollout.config.run_dir import RunFolder
from rollout.runtime.local import launch_local
from tests.support.cuda_wheels import CudaWheels
from tests.support.served_fakes import launched


def test_doctor_has_the_runtime_of_each_group_that_preloads_the_saver(tmp_path: Path) -> None:
    wheels = CudaWheels(tmp_path, "99.0")
    group = {"kind": "sglang", "needs_offload": True, "python": wheels.python}
    groups = [
        group | {"name": "main"},
        group | {"name": "attached", "kind": "attached"},
        group | {"name": "vllm", "kind": "vllm"},
        group | {"name": "serving", "needs_offload": False},
        group | {"name": "on_cpu"},
    ]
    engines = [{"group": one["name"], "num_gpus": int(one["name"] != "on_cpu")} for one in groups]
    runtimes = cuda_runtimes({"groups": groups, "engines": engines})
    assert runtimes.keys() == {"main"}
    assert "the loader finds no libcudart.so.99" in runtimes["main"]
    assert cuda_runtimes({"server": "main", "is_answering": False}) == {}


def test_doctor_asks_the_interpreter_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    fake = kinds.KINDS["fake"]
    monkeypatch.setitem(kinds.KINDS, "fake", replace(fake, preloads_saver=True))
    wheels = CudaWheels(tmp_path / "engine", "")
    engine = {"kind": "fake", "gpus": 1, "python": wheels.python}
    with launched(launch_local, tmp_path, {"main": {"num_engines": 1, "engine": engine}}) as handle:
        run = str(RunFolder.of(handle.config).path)
        (report,) = json.loads(CliRunner().invoke(app, ["doctor", run, "--json"]).output)
        text = CliRunner().invoke(app, ["doctor", run], env={"COLUMNS": "500"}).output
    said = f"none: {wheels.python} has no torch, or one without CUDA"
    assert report["cuda_runtimes"] == {"main": said}
    assert f"CUDA runtime  group main: {said}" in text
