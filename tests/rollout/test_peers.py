"""Which engine's weights a restarted one is given."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from engines.errors import EngineRejected
from engines.fake import FakeEngine
from engines.launch import RunningEngine
from engines.protocol import Endpoint, MemoryTag, TensorInfo
from rollout.member import Member
from rollout.peers import PeerSource, can_give
from rollout.types import EngineSlot


class Process:
    """One that listens at its number."""

    def __init__(self, index: int) -> None:
        self.endpoint = Endpoint("127.0.0.1", 1000 + index)


class Taker(FakeEngine):
    """Takes weights from those whose ports it is told of."""

    def __init__(self, *good: int) -> None:
        super().__init__()
        self.good = good
        self.asked: list[tuple[str, str | None]] = []

    async def update_weights_from_peer(
        self, url: str, *, flush_cache: bool = True, weight_version: str | None = None
    ) -> None:
        self.asked.append((url, weight_version))
        if int(url.rpartition(":")[2]) not in self.good:
            raise EngineRejected("broke off")


def slot(index: int) -> EngineSlot:
    return EngineSlot(
        engine_id=f"main-{index}", group="main", index=index, node_id="node", gpu_ids=()
    )


def member(index: int, **settings: Any) -> Member:
    return Member(
        slot=slot(index),
        process=cast(RunningEngine, Process(index)),
        engine=FakeEngine(),
        has_session=True,
        **{"weight_version": 7, "gives_weights": True, **settings},
    )


@pytest.mark.parametrize(
    ("settings", "can"),
    [
        ({}, True),
        ({"weight_version": 6}, False),
        ({"weight_version": None}, False),
        ({"gives_weights": False}, False),
        ({"is_proved": False}, False),
        ({"is_stale": True}, False),
        ({"owes_canary": True}, False),
        ({"adapter": "policy"}, False),
        ({"released": {MemoryTag.KV_CACHE}}, False),
    ],
)
def test_who_can_give(settings: dict[str, Any], can: bool) -> None:
    assert can_give(member(0, **settings), 7) is can


async def test_the_first_that_can_is_asked_and_what_it_was_given_is_told() -> None:
    peer = member(
        2,
        tensors=(TensorInfo("a", "bfloat16", (2, 3)),),
        pushed={"a": "xxh3:1"},
        pushed_dtypes={"a": "float32"},
        base_version=6,
    )
    engine = Taker(1002, 1003)
    members = [member(0), member(1, is_proved=False), peer, member(3)]
    restored = await PeerSource(lambda: members).restore(engine, 7, slot(0))
    assert engine.asked == [("http://127.0.0.1:1002", "7")]
    assert restored is not None
    assert restored.base_version == 6
    assert restored.manifest.fingerprints == {"a": "xxh3:1"}
    (spec,) = restored.manifest.tensors.values()
    assert (spec.dtype, spec.shape) == ("float32", (2, 3))


async def test_one_that_fails_is_followed_by_the_next() -> None:
    engine = Taker(1002)
    source = PeerSource(lambda: [member(1), member(2)])
    assert await source.restore(engine, 7, slot(0)) is not None
    assert [url for url, _ in engine.asked] == ["http://127.0.0.1:1001", "http://127.0.0.1:1002"]


@pytest.mark.parametrize("make", [list, lambda: [member(0)], lambda: [member(1)]])
async def test_where_nobody_gives_them_there_are_none(make: Callable[[], list[Member]]) -> None:
    assert await PeerSource(make).restore(Taker(), 7, slot(0)) is None
