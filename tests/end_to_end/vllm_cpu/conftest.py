"""Two groups of one real vLLM engine each behind the real router, started once for all here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import FOR_VLLM, plain_models
from tests.support.real_policy import Keeper, RealPolicy, one_engine


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return plain_models(tmp_path_factory.mktemp("policies"), **FOR_VLLM)


@pytest.fixture(scope="package")
def keeper(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    keeper = Keeper(models, tmp_path_factory.mktemp("two-groups"), one_engine("vllm"))
    yield keeper
    keeper.close()


@pytest.fixture
def policy(keeper: Keeper) -> Iterator[RealPolicy]:
    yield keeper.policy()
    keeper.look()
