"""Two groups of one real SGLang engine each behind the real router, started once for all here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.real_sglang import RealPolicy, one_engine, real_policy

GROUPS = ("left", "right")
NUM_PLAIN = 94
"""The first ids of the tiny tokenizer: printable ASCII."""


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
    root = tmp_path_factory.mktemp("policies")
    return [make_plain_model(root / f"weights-{seed}", seed) for seed in range(4)]


def make_plain_model(path: Path, seed: int) -> Path:
    """A tiny model whose greedy tokens are plain ASCII: a request goes on where its text is whole,
    which random bytes seldom are.
    """
    from safetensors.torch import load_file, save_file

    from engines.embedded.tiny import make_tiny_model

    make_tiny_model(path, seed=seed, hidden_size=32, num_layers=1)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][NUM_PLAIN:] = 0.0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="package")
def keeper(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    keeper = Keeper(models, tmp_path_factory.mktemp("two-groups"))
    yield keeper
    keeper.close()


@pytest.fixture
def policy(keeper: Keeper) -> Iterator[RealPolicy]:
    yield keeper.policy()
    keeper.look()
