"""The fixtures of the tests over two groups of one real engine each, started once for a whole run.

``real_policies`` is one for all folders of these tests; each has the others and a ``kind``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import FOR_VLLM, plain_models
from tests.support.real_policy import Keeper, RealPolicy, one_engine

_SHAPES: dict[str, dict[str, int]] = {"sglang": {}, "vllm": FOR_VLLM}


class RealPolicies(dict[str, Keeper]):
    """The policy of each kind of engine."""

    def __init__(self, paths: pytest.TempPathFactory) -> None:
        super().__init__()
        self._paths = paths

    def __missing__(self, kind: str) -> Keeper:
        models = plain_models(self._paths.mktemp("policies"), **_SHAPES[kind])
        self[kind] = Keeper(models, self._paths.mktemp("two-groups"), one_engine(kind))
        return self[kind]


@pytest.fixture(scope="session")
def real_policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPolicies]:
    made = RealPolicies(tmp_path_factory)
    yield made
    for keeper in made.values():
        keeper.close()


@pytest.fixture(scope="module")
def models(kind: str, real_policies: RealPolicies) -> list[Path]:
    return real_policies[kind].models


@pytest.fixture
def policy(kind: str, real_policies: RealPolicies) -> Iterator[RealPolicy]:
    yield real_policies[kind].policy()
    real_policies[kind].look()


@pytest.fixture
def known_weights_after(policy: RealPolicy) -> Iterator[None]:
    """For a test that pushes weights of its own: those of the next version follow."""
    yield
    if policy.is_whole():
        policy.handle.push(policy.next_tensors()).result(120)
