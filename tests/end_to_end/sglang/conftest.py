"""Two groups of one real SGLang engine each behind the real router, started once for all here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.models import plain_models
from tests.support.real_sglang import RealPolicy, one_engine, real_policy

GROUPS = ("left", "right")


class Keeper:
    """Starts the policy when it is first wanted, and again after a test that lost it."""

    def __init__(self, models: list[Path], folder: Path) -> None:
        self._models = models
        self._folder = folder
        self._stack = ExitStack()
        self._policy: RealPolicy | None = None

    def policy(self) -> RealPolicy:
        if self._policy is None:
            groups = {name: one_engine() for name in GROUPS}
            self._policy = self._stack.enter_context(
                real_policy(self._models, self._folder, groups, router={"failover_interval": 4})
            )
        return self._policy

    def look(self) -> None:
        """End it if it does not serve as a test found it."""
        if self._policy is not None and not self._policy.is_whole():
            self.close()

    def close(self) -> None:
        self._policy = None
        self._stack.close()


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return plain_models(tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="package")
def keeper(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    keeper = Keeper(models, tmp_path_factory.mktemp("two-groups"))
    yield keeper
    keeper.close()


@pytest.fixture
def policy(keeper: Keeper) -> Iterator[RealPolicy]:
    yield keeper.policy()
    keeper.look()
