"""Engines shared by all tests of the run; each test hands them back serving, at version 0."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.embedded.engine_client import Asker, Server, connected, two_servers


def tiny(path: Path, **options: Any) -> Path:
    from rollout.testing.tiny_model import make_tiny_model

    return make_tiny_model(path, **options)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "first": tiny(root / "first", hidden_size=256),
        "second": tiny(root / "second", hidden_size=256, seed=1),
        "other_shape": tiny(root / "other_shape", hidden_size=128),
        "qwen": tiny(
            root / "qwen",
            architecture="qwen3",
            hidden_size=512,
            num_layers=4,
            tie_embeddings=True,
        ),
    }


@pytest.fixture(scope="session")
def servers(
    models: dict[str, Path],
) -> Iterator[dict[str, Server]]:
    with two_servers(models) as started:
        yield started


@pytest.fixture
async def engine(servers: dict[str, Server], models: dict[str, Path]) -> AsyncIterator[Asker]:
    """The llama engine with a memory saver and no backup."""
    async with connected(servers["plain"]) as asker:
        yield asker


@pytest.fixture
async def backed(servers: dict[str, Server]) -> AsyncIterator[Asker]:
    """The qwen3 engine, which backs its weights up."""
    async with connected(servers["backed"]) as asker:
        yield asker
