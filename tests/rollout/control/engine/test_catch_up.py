"""An engine that a source gave its weights is held against what it was given."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engines.protocol import TensorInfo, WeightsReport
from rollout.control.engine.catch_up import readmit
from rollout.control.engine.state import EngineState
from rollout.core.errors import WeightMismatch
from rollout.core.types import EngineSlot
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.store.weight_source import Restored


class HoldingEngine:
    """Says that it holds version 1, and what its only tensor looks like."""

    async def weight_version(self) -> str:
        return "1"

    async def weights_checker(self, action: str = "checksum") -> WeightsReport:
        return WeightsReport("all", ({"w": "xxh3:held"},))


class GivingSource:
    """Has given the engine a tensor that looked like this when it was pushed."""

    def __init__(self, dtype: str, fingerprint: str) -> None:
        spec = TensorSpec("w", dtype, (2,))
        self._restored = Restored(Manifest({"w": spec}, {"w": fingerprint}))

    async def restore(self, engine: Any, version: int, slot: EngineSlot) -> Restored | None:
        return self._restored


class Asked:
    """Stands for an engine's log-prob check; records its requests."""

    def __init__(self, wrong: str = "") -> None:
        self.about: list[str] = []
        self._wrong = wrong

    async def __call__(self, member: EngineState, version: int, left_open: str) -> str:
        self.about.append(left_open)
        return self._wrong


async def complete(member: EngineState) -> None:
    """There are no adapters."""


def stale_member() -> EngineState:
    return EngineState(
        slot=EngineSlot("main-0", "main", 0),
        process=cast("Any", SimpleNamespace(node_ids=())),
        engine=cast("Any", HoldingEngine()),
        has_session=True,
        weight_version=None,
        has_checker=True,
        tensors=(TensorInfo("w", "float32", (2,)),),
        is_stale=True,
    )


@pytest.mark.parametrize(
    ("dtype", "fingerprint", "is_left_open"),
    [("float32", "xxh3:held", False), ("bfloat16", "xxh3:not comparable", True)],
)
def test_an_engine_that_holds_what_it_was_given_serves(
    dtype: str, fingerprint: str, is_left_open: bool
) -> None:
    member, asked = stale_member(), Asked()
    assert asyncio.run(
        readmit(member, 1, [GivingSource(dtype, fingerprint)], None, asked, complete)
    )
    assert member.is_verified
    assert not member.is_stale
    assert any(asked.about) is is_left_open


def test_the_only_engine_that_holds_something_else_than_it_was_given_does_not_serve() -> None:
    member, sources = stale_member(), [GivingSource("float32", "xxh3:another")]
    with pytest.raises(WeightMismatch, match="given weight version 1, but tensor 'w' is not what"):
        asyncio.run(readmit(member, 1, sources, None, Asked(), complete))
    assert member.is_stale


def test_an_engine_whose_canary_is_wrong_does_not_serve() -> None:
    member, sources = stale_member(), [GivingSource("bfloat16", "xxh3:not comparable")]
    with pytest.raises(WeightMismatch, match="given weight version 1, but it sings of others"):
        asyncio.run(readmit(member, 1, sources, None, Asked("it sings of others"), complete))
    assert member.is_stale
