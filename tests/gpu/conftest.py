"""The tests of ``make test-gpu``: on a real GPU with ``-m gpu``, else on a logical one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gpu.machine import Gpu, devices, the_gpu
from tests.support.gpu.model import make_model

_MARK = "gpu"
_passed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run for the GPU in which no test used it has shown nothing, so it has failed."""
    # Not by the keywords of a report: this folder has the name of the marker.
    selected = {one.nodeid for one in session.items if one.get_closest_marker(_MARK)}
    if selected and not selected & _passed and not session.config.option.collectonly:
        print(f"\nof {len(selected)} tests for a GPU none was run and passed")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module", params=devices())
def gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    """The GPU of all tests of a module."""
    with the_gpu(request.param, tmp_path_factory.mktemp("gpus")) as one:
        yield one


@pytest.fixture(scope="session")
def made_models() -> dict[str, Path]:
    """Models that were made, by device."""
    return {}


@pytest.fixture(scope="module")
def model(gpu: Gpu, made_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, made once for each kind of GPU."""
    if gpu.device not in made_models:
        made_models[gpu.device] = make_model(tmp_path_factory.mktemp("model") / "qwen3", gpu)
    return made_models[gpu.device]
