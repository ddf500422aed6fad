"""The fixtures of the tests over two groups of one real engine each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import plain_models
from tests.support.real_policy import Keeper, RealPolicy, one_engine


def real_fixtures(kind: str, **shape: int) -> tuple[Any, Any, Any, Any]:
    """``models``, ``keeper``, ``policy`` and ``known_weights_after`` of a folder of tests.

    Args:
        kind: of the engines.
        shape: of the models; see ``make_tiny_model``.
    """

    @pytest.fixture(scope="package")
    def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
        return plain_models(tmp_path_factory.mktemp("policies"), **shape)

    @pytest.fixture(scope="package")
    def keeper(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
        keeper = Keeper(models, tmp_path_factory.mktemp("two-groups"), one_engine(kind))
        yield keeper
        keeper.close()

    @pytest.fixture
    def policy(keeper: Keeper) -> Iterator[RealPolicy]:
        yield keeper.policy()
        keeper.look()

    @pytest.fixture
    def known_weights_after(policy: RealPolicy) -> Iterator[None]:
        """For a test that pushes weights of its own: those of the next version follow."""
        yield
        if policy.is_whole():
            policy.handle.serve_weights(policy.next_tensors()).result(120)

    return models, keeper, policy, known_weights_after
