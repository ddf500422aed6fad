"""One push that reaches each engine by a route of its own."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from engines.fake import FakeEngine
from rollout.core.errors import WeightMismatch
from rollout.weights.push.stream_reader import PushStreamReader, join_payload, split_payload
from rollout.weights.push.stream_server import PushStreamServer
from rollout.weights.push.weight_push import PushTarget, WeightPush, push_weights
from rollout.weights.routes.by_value import ByValue
from rollout.weights.routes.cuda_ipc import ByHandles
from rollout.weights.routes.route import EngineRoute, Payload, StreamedBucket
from rollout.weights.routes.shared_memory import ByPath
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
    routes = {
        "a": EngineRoute("handles", ByHandles(("gpu-2", "gpu-0"))),
        "b": EngineRoute("handles", ByHandles(("gpu-1",))),
    }
    payload = {"handles": handles(**{f"gpu-{n}": b"handle %d" % n for n in range(3)})}
    the_push = WeightPush(4, manifest(), [payload, payload], routes=routes)
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
    route = ByHandles(("gpu-0",))
    the_push = WeightPush(4, manifest(), [handles(x=b"")], route)
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
    # A route without a payload in a bucket: only the others get it.
    del payloads[0]["path 0"]
    routes = {"a": EngineRoute("value", ByValue()), "b": EngineRoute("path 0", ByPath())}
    the_push = WeightPush(4, manifest(), payloads, routes=routes)
    answers = await push_weights(
        the_push, {"a": PushTarget(one), "b": PushTarget(other)}, budget_s=9
    )
    assert [answer.failure for answer in answers.values()] == [None, None]
    assert loaded == [("/x", "4")]
    assert await one.weight_version() == "4"
    operations = [call.operation for call in other.calls]
    assert "begin_weight_update" not in operations


async def test_an_engine_that_came_after_the_plan_gets_a_push_that_is_the_same_for_all() -> None:
    targets = {"a": PushTarget(FakeEngine("a")), "new": PushTarget(FakeEngine("new"))}
    (value,) = push(4).buckets
    answers = await push_weights(WeightPush(4, manifest(), [value]), targets, budget_s=10)
    assert [answer.failure for answer in answers.values()] == [None, None]

    routes = {"a": EngineRoute("value", ByValue()), "b": EngineRoute("path 0", ByPath())}
    with_routes = WeightPush(5, manifest(), [{"value": push(5).buckets[0]}], routes=routes)
    answers = await push_weights(with_routes, targets, budget_s=10)
    assert set(answers) == {"a"}
    assert answers["a"].failure is None
    assert await targets["new"].engine.weight_version() == "4"


def test_a_payload_with_bytes_is_the_same_after_the_stream() -> None:
    for payload in (b"abc", {"path": "/x"}, {"value": b"abc", "path 0": {"path": "/x"}}, {}):
        head, body = split_payload(payload)
        assert join_payload(head, body) == payload


async def test_a_stream_carries_all_payloads_of_a_bucket() -> None:
    bucket: Payload = {"value": bytes(range(256)) * 999, "path 0": {"path": "/x"}}
    with_buckets = PushStreamServer([StreamedBucket(bucket, is_last=True)])
    try:
        reader = PushStreamReader(with_buckets.address, "main")
        await reader.open(())
        assert [one async for one in reader] == [(bucket, True)]
        await reader.close()
    finally:
        with_buckets.close()
