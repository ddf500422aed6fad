"""Engines of every kind for the contract suite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from engines.kinds import KINDS as ENGINE_KINDS
from engines.launch import EngineSpec
from tests.support.contract import VLLM_STUB, Bench, Models, Pool, faked, pooled, stubbed
from tests.support.cpu_engines import cpu_engine
from tests.support.nvml import NvmlDouble, logical_gpu_environment, nvml_double
from tests.support.toy_kind import TOY

KINDS = [
    "fake",
    "fake-http",
    pytest.param("embedded", marks=pytest.mark.embedded),
    pytest.param("sglang", marks=pytest.mark.sglang),
    # On a logical GPU, where a release leaves the host's memory as it is.
    pytest.param("embedded-gpu", marks=[pytest.mark.embedded, pytest.mark.slow]),
    pytest.param("sglang-gpu", marks=[pytest.mark.sglang, pytest.mark.chaos]),
]
VLLM = pytest.param("vllm", marks=pytest.mark.vllm)
"""Not among ``KINDS``: what kills SGLang, and its broadcast groups, are not vLLM's."""
ON_GPU = "-gpu"
NOWHERE = Models(Path("/models/first"), Path("/models/second"))
_GPU_BYTES = 8 << 30


@pytest.fixture(scope="session")
def contract_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    from rollout.testing.tiny_model import make_tiny_model

    root = tmp_path_factory.mktemp("contract")
    first, second = (make_tiny_model(root / f"model-{seed}", seed=seed) for seed in (0, 1))
    return Models(first, second)


@pytest.fixture(scope="session")
def vllm_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """With heads of 32: the CPU kernels of vLLM know no smaller ones."""
    from rollout.testing.tiny_model import make_tiny_model

    root = tmp_path_factory.mktemp("contract-vllm")
    first, second = (
        make_tiny_model(root / f"model-{seed}", seed=seed, hidden_size=128) for seed in (0, 1)
    )
    return Models(first, second)


@pytest.fixture(scope="session")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the logical GPU that contract engines are on."""
    folder = tmp_path_factory.mktemp("contract-gpus")
    NvmlDouble(folder).add(0, "GPU-0000", _GPU_BYTES)
    return folder


@pytest.fixture(scope="session")
def pools(
    request: pytest.FixtureRequest, gpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Pool]]:
    """Pools by kind of engine, made when first asked for."""
    logs = tmp_path_factory.mktemp("contract-logs")

    def spec_of(label: str) -> EngineSpec:
        kind = label.removesuffix(ON_GPU)
        return EngineSpec(
            engine_id=kind,
            model_path=str(NOWHERE.first)
            if kind == TOY.name
            else str(request.getfixturevalue(models_of(kind)).first),
            log_path=str(logs / f"{label}-0.log"),
            gpu_ids=(0,) if label.endswith(ON_GPU) else (),
            **(on_gpu(kind, gpus) if label.endswith(ON_GPU) else cpu_engine(kind)),
        )

    made: dict[str, Pool] = _Pools(spec_of)
    yield made
    for pool in made.values():
        pool.close()


def on_gpu(kind: str, gpus: Path) -> dict[str, Any]:
    """Settings of an engine whose memory is on a logical GPU."""
    env = logical_gpu_environment(gpus)
    found = cpu_engine(kind)
    return found | {"env": env | found.get("env", {})}


def models_of(kind: str) -> str:
    """The fixture with the checkpoints of this kind."""
    return "vllm_models" if kind == "vllm" else "contract_models"


class _Pools(dict[str, Pool]):
    def __init__(self, spec_of: Any) -> None:
        super().__init__()
        self._spec_of = spec_of

    def __missing__(self, kind: str) -> Pool:
        self[kind] = Pool(self._spec_of(kind))
        return self[kind]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """One kind of engine after the other."""
    return str(request.param)


@pytest.fixture
async def bench(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """An engine of this kind, serving version 0 of the first model."""
    opened: AbstractAsyncContextManager[Bench]
    with ExitStack() as stack:
        if kind.endswith(ON_GPU):
            stack.enter_context(nvml_double(request.getfixturevalue("gpus")))
        if kind == VLLM_STUB:
            opened = stubbed(NOWHERE)
        elif kind.startswith("fake"):
            opened = faked(NOWHERE, is_served=kind == "fake-http")
        elif kind == TOY.name:
            stack.enter_context(patch.dict(ENGINE_KINDS, {TOY.name: TOY}))
            opened = pooled(request.getfixturevalue("pools")[kind], NOWHERE, like="fake")
        else:
            pools = request.getfixturevalue("pools")
            opened = pooled(pools[kind], request.getfixturevalue(models_of(kind)))
        async with opened as one:
            yield one
