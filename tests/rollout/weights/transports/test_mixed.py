"""One push that reaches each engine on a way of its own."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from engines.fake import FakeEngine
from rollout.core.errors import WeightMismatch, WeightsUnavailable
from rollout.weights.push.stream_reader import PushStreamReader, join_payload, split_payload
from rollout.weights.push.stream_server import PushStreamServer, StreamedBucket
from rollout.weights.push.weight_push import PushTarget, WeightPush, push_weights
from rollout.weights.transports.carriers import ByPath, ByValue, Payload
from rollout.weights.transports.mixed import ByHandles, Mixed, Way
from tests.support.builders import manifest, push


class Recording(FakeEngine):
    """Notes which entries each tensor-parallel rank would get."""

    def __init__(self, engine_id: str) -> None:
        super().__init__(engine_id)
        self.entries: list[list[str]] = []

    async def update_weights_from_tensor(
        self, serialized_named_tensors: Sequence[str], **more: Any
    ) -> None:
        self.entries.append(list(serialized_named_tensors))
        if more["weight_version"] is not None:
            await self.update_weight_version(more["weight_version"])


def handles(**of: bytes) -> Mapping[str, Any]:
    def text(part: bytes) -> str:
        return base64.b64encode(part).decode()

    named = {uuid: text(handle) for uuid, handle in of.items()}
    return {"head": text(b"<"), "tail": text(b">"), "handles": named}


async def test_each_tensor_parallel_rank_gets_the_handle_of_its_own_gpu() -> None:
    engines = {"a": Recording("a"), "b": Recording("b")}
    ways = {
        "a": Way("handles", ByHandles(("gpu-2", "gpu-0"))),
        "b": Way("handles", ByHandles(("gpu-1",))),
    }
    payload = {"handles": handles(**{f"gpu-{n}": b"handle %d" % n for n in range(3)})}
    the_push = WeightPush(4, manifest(), [payload, payload], Mixed(ways))
    targets = {"a": PushTarget(engines["a"], payload_copies=2), "b": PushTarget(engines["b"])}
    answers = await push_weights(the_push, targets, budget_s=10)
    assert [answer.failure for answer in answers.values()] == [None, None]
    got = {
        name: [[base64.b64decode(entry) for entry in one] for one in engine.entries]
        for name, engine in engines.items()
    }
    assert got == {"a": [[b"<handle 2>", b"<handle 0>"]] * 2, "b": [[b"<handle 1>"]] * 2}
    assert await engines["a"].weight_version() == "4"


async def test_an_engine_with_other_ranks_than_planned_gets_nothing() -> None:
    engine = Recording("a")
    ways = {"a": Way("handles", ByHandles(("gpu-0",)))}
    the_push = WeightPush(4, manifest(), [{"handles": handles(x=b"")}], Mixed(ways))
    answers = await push_weights(the_push, {"a": PushTarget(engine, 2)}, budget_s=10)
    assert isinstance(answers["a"].failure.__cause__, WeightMismatch)  # type: ignore[union-attr]
    assert engine.entries == []


async def test_engines_of_one_push_get_it_by_value_and_by_path() -> None:
    one, other = FakeEngine("a"), FakeEngine("b")
    loaded: list[tuple[str, str | None]] = []

    async def from_disk(path: str, **more: Any) -> None:
        loaded.append((path, more["weight_version"]))

    other.update_weights_from_disk = from_disk  # type: ignore[method-assign]
    values = push(4, num_buckets=2).buckets
    payloads: list[Any] = [{"value": value, "path 0": {"path": "/x"}} for value in values]
    # A way without a part in a bucket: only the others get it.
    del payloads[0]["path 0"]
    ways = {"a": Way("value", ByValue()), "b": Way("path 0", ByPath())}
    the_push = WeightPush(4, manifest(), payloads, Mixed(ways))
    answers = await push_weights(
        the_push, {"a": PushTarget(one), "b": PushTarget(other)}, budget_s=9
    )
    assert [answer.failure for answer in answers.values()] == [None, None]
    assert loaded == [("/x", "4")]
    assert await one.weight_version() == "4"
    operations = [call.operation for call in other.calls]
    assert "begin_weight_update" not in operations


async def test_an_engine_that_came_after_the_plan_fails_alone_unless_all_go_one_way() -> None:
    targets = {"a": PushTarget(FakeEngine("a")), "new": PushTarget(FakeEngine("new"))}
    payload: Any = {"value": push(4).buckets[0]}
    way = Way("value", ByValue())
    the_push = WeightPush(4, manifest(), [payload], Mixed({"a": way}))
    answers = await push_weights(the_push, targets, budget_s=10)
    assert [answer.failure for answer in answers.values()] == [None, None]

    ways = {"a": way, "b": Way("path 0", ByPath())}
    answers = await push_weights(
        WeightPush(5, manifest(), [payload], Mixed(ways)), targets, budget_s=10
    )
    assert answers["a"].failure is None
    assert isinstance(answers["new"].failure.__cause__, WeightsUnavailable)  # type: ignore[union-attr]


def test_a_payload_with_bytes_is_the_same_after_the_stream() -> None:
    for payload in (b"abc", {"path": "/x"}, {"value": b"abc", "path 0": {"path": "/x"}}, {}):
        body, fields = split_payload(payload)
        assert join_payload(fields, body if "num_bytes" in fields else None) == payload


async def test_a_stream_carries_all_ways_of_a_bucket() -> None:
    bucket: Payload = {"value": bytes(range(256)) * 999, "path 0": {"path": "/x"}}
    with_buckets = PushStreamServer([StreamedBucket(bucket, is_last=True)])
    try:
        reader = PushStreamReader(with_buckets.address, "main")
        await reader.open(())
        assert [one async for one in reader] == [(bucket, True)]
        await reader.close()
    finally:
        with_buckets.close()


def test_a_way_uses_the_session_and_the_groups_of_its_carrier() -> None:
    assert Way("handles", ByHandles(())).needs_session
    assert not Way("path 0", ByPath()).needs_session
    assert not Way("path 0", ByPath()).joins
