"""The tests of ``make test-gpu``: on a real GPU with ``-m gpu``, else on a logical one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gpu.machine import Gpu, devices, the_gpu
from tests.support.gpu.model import make_model


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
