"""A push of one process: fingerprints, routes, and what is open after its end.  Needs torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine
from engines.tensors.fingerprint import BYTES, SUMS
from rollout.config import Transport, WeightUpdate
from rollout.core.errors import ConfigError
from rollout.weights.push.push import PushRequest
from rollout.weights.push.weight_push import push_weights
from rollout.weights.routes.route import EnginePlace, PushTarget
from tests.support.still_server import HERE, StillServer, server_config

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

from engines.tensors import torch_fingerprint  # noqa: E402
from rollout.weights.ranks.follower import Follower  # noqa: E402
from rollout.weights.ranks.leader import Leader, push_of_one_rank  # noqa: E402
from rollout.weights.ranks.trainer_rank import TrainerRank  # noqa: E402
from rollout.weights.tensors import bucket_bytes as bucket_writer  # noqa: E402

pytestmark = pytest.mark.embedded
MAKE = {BYTES: torch_fingerprint.bytes_fingerprint, SUMS: torch_fingerprint.device_fingerprint}


@pytest.mark.parametrize("method", [BYTES, SUMS, ""])
@pytest.mark.parametrize("transport", [Transport.SHARED_MEMORY, Transport.BY_VALUE, Transport.DISK])
def test_a_push_has_the_fingerprints_that_its_engines_make(
    transport: Transport, method: str, tmp_path: Path
) -> None:
    tensors = {"a": torch.randn(64, 8), "b": torch.randn(5).to(torch.bfloat16)}
    paths = {"disk_path": str(tmp_path / "{version}"), "shared_memory_path": str(tmp_path)}
    rank = TrainerRank(server_config(tmp_path, transport=transport, **paths))
    server = StillServer(fingerprints=method)
    with push_of_one_rank(rank, server, PushRequest(tensors, 1), may_stream=False) as made:
        make = MAKE.get(method)
        expected = {name: make(name, one) for name, one in tensors.items() if make}
        assert made.weights.manifest.fingerprints == expected
    rank.close()


def test_sums_never_copy_a_tensor_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of a tensor on a GPU: what is copied to the host is counted."""
    copied: list[int] = []
    original = torch_fingerprint._host_bytes
    monkeypatch.setattr(
        torch_fingerprint,
        "_host_bytes",
        lambda content: copied.append(content.nbytes) or original(content),
    )
    tensor = torch.randn(8 << 20)
    bucket_writer.fingerprints_of([("a", tensor)], SUMS)
    assert 0 < sum(copied) < tensor.nbytes / 16


FAR, WIDE = EnginePlace("far", "another host"), EnginePlace("wide", "")
NEAR = EnginePlace("near", HERE)


def routed(tmp_path: Path, *engines: EnginePlace, may_stream: bool) -> dict[str, str]:
    """Engine id -> the payload that it gets of a push with ``auto``."""
    rank = TrainerRank(server_config(shared_memory_path=str(tmp_path)))
    tensors = {"a": torch.randn(64)}
    server, request = StillServer(engines=engines), PushRequest(tensors, 1)
    made = push_of_one_rank(rank, server, request, may_stream=may_stream)
    try:
        routes = [made.weights.route_of(one.engine_id) for one in engines]
        names = [type(one.route).__name__ for one in routes if one is not None]
        return {one.engine_id: name for one, name in zip(engines, names, strict=True)}
    finally:
        made.close()
        rank.close()


def test_each_engine_of_one_process_has_the_best_route_that_reaches_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert routed(tmp_path, NEAR, may_stream=True) == {"near": "ByPath"}
    streamed = routed(tmp_path, NEAR, FAR, WIDE, may_stream=True)
    assert streamed == {"near": "ByPath", "far": "ByBroadcast", "wide": "ByBroadcast"}
    assert not caplog.text
    copied = routed(tmp_path, NEAR, FAR, WIDE, may_stream=False)
    assert copied == {"near": "ByPath", "far": "ByValue", "wide": "ByValue"}
    assert "engine far and 1 more: the weights go by value, 512 bytes" in caplog.text


def test_much_by_value_that_was_not_named_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.weights.routes.choice.MOST_BYTES_BY_VALUE", 255)
    with pytest.raises(ConfigError, match="engine far: the weights go by value, 256 bytes"):
        routed(tmp_path, NEAR, FAR, may_stream=False)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("may_stream", [False, True])
async def test_a_push_by_value_beside_another_route_splits_its_own_payload_alone(
    tmp_path: Path, may_stream: bool
) -> None:
    engines = {"near": FakeEngine("near"), "alone": FakeEngine("alone")}
    places = [NEAR, EnginePlace("alone", "another host", why_no_groups="it joins no groups")]
    rank = TrainerRank(server_config(shared_memory_path=str(tmp_path)))
    tensors = {f"t{number}": torch.randn(3 << 20) for number in range(4)}  # 12 MiB each
    server, request = StillServer(engines=places), PushRequest(tensors, 7)
    made = push_of_one_rank(rank, server, request, may_stream=may_stream)
    try:
        targets = {name: PushTarget(engine) for name, engine in engines.items()}
        answers = await push_weights(made.weights, targets, budget_s=60)
    finally:
        made.close()
        rank.close()
    assert [answer.failure for answer in answers.values()] == [None, None]
    assert [await engine.weight_version() for engine in engines.values()] == ["7", "7"]
    assert engines["near"].operations().count("update_weights_from_disk") == 1
    assert engines["alone"].operations().count("update_weights_from_tensor") == len(tensors)


@pytest.mark.parametrize(("room_bytes", "payload"), [(0, "distributed"), (256, "shared_memory 1")])
def test_room_is_checked_on_every_host_with_ranks(
    tmp_path: Path, room_bytes: int, payload: str
) -> None:
    rank = TrainerRank(server_config(shared_memory_path=str(tmp_path)), hosts=[0, 1])
    server = StillServer(engines=[NEAR, EnginePlace("beside rank 1", "its host")])
    request = PushRequest({"a": torch.randn(64)})
    follower = Follower(rank, server, request, timeout_s=10)
    leader = Leader(server, follower, WeightUpdate.FULL, may_stream=True, streams=True)
    own = follower.ready()
    assert own.room_bytes > 256
    other = replace(own, node="its host", room_bytes=room_bytes)
    plan = leader.decide([own, other])
    rank.close()
    assert {one.payload for one in plan.routes} == {"shared_memory 0", payload}


MIB = 1 << 20


@pytest.mark.parametrize(
    ("streams", "stores", "num_writers", "room_bytes", "is_reached"),
    [
        (True, False, 1, 2 * MIB, True),  # the bucket that is loaded, and the next
        (True, False, 1, 2 * MIB - 1, False),
        (True, False, 4, MIB, True),  # each rank keeps its buffer
        (True, False, 4, MIB - 1, False),
        (False, False, 1, 8 * MIB, True),
        (False, False, 1, 8 * MIB - 1, False),
        (True, True, 1, 8 * MIB - 1, False),  # the store reads all buckets after the push
    ],
)
def test_room_is_needed_for_what_is_held_at_once(
    streams: bool,
    stores: bool,
    num_writers: int,
    room_bytes: int,
    is_reached: bool,
    tmp_path: Path,
) -> None:
    store = {"store": {"path": str(tmp_path)}} if stores else {}
    paths = {"shared_memory_path": str(tmp_path), "bucket_bytes": MIB}
    rank = TrainerRank(server_config(**paths, **store), hosts=[0] * num_writers)
    server = StillServer(engines=[NEAR])
    request = PushRequest({f"t{number}": torch.zeros(MIB // 4) for number in range(8)})
    follower = Follower(rank, server, request, timeout_s=10)
    leader = Leader(server, follower, WeightUpdate.FULL, may_stream=True, streams=streams)
    ready = replace(follower.ready(), room_bytes=room_bytes)
    plan = leader.decide([ready] * num_writers)
    rank.close()
    assert ("shared_memory 0" in {one.payload for one in plan.routes}) is is_reached


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("transport", ["shared_memory", "by_value", "disk"])
def test_a_copy_that_fails_at_any_bucket_leaves_nothing_open(
    transport: str, at: int, tmp_path: Path
) -> None:
    num_seen = 0

    def failing(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        nonlocal num_seen
        num_seen += not tensor.is_meta
        if not tensor.is_meta and num_seen == at + 1:
            raise ValueError("out of memory")
        yield name, tensor

    paths = {"shared_memory_path": str(tmp_path), "disk_path": str(tmp_path / "{version}")}
    config = server_config(tmp_path / "model", transport=transport, bucket_bytes=256, **paths)
    rank, server = TrainerRank(config), StillServer()
    tensors = {f"t{number}": torch.randn(64) for number in range(4)}
    threads = threading.active_count()
    with pytest.raises(ValueError, match="out of memory"):
        push_of_one_rank(rank, server, PushRequest(tensors, 1, failing), may_stream=False)
    assert threading.active_count() == threads
    assert not [one for one in tmp_path.iterdir() if not one.name.startswith("rollout-push-")]
    num_bytes = rank.pool.num_bytes()
    # The next push takes the memory of the one that failed.
    push_of_one_rank(rank, server, PushRequest(tensors, 2), may_stream=False).close()
    if transport == "shared_memory" and at:
        assert 0 < num_bytes <= rank.pool.num_bytes() == len(tensors) * num_bytes // at
    rank.close()


@pytest.mark.parametrize("store", [None, {"path": "/dev/shm"}], ids=["no store", "store"])
def test_two_open_pushes_of_one_version_have_memory_of_their_own(
    tmp_path: Path, store: dict[str, Any] | None
) -> None:
    rank = TrainerRank(server_config(shared_memory_path=str(tmp_path), store=store))
    first, second = (
        push_of_one_rank(rank, StillServer(), PushRequest({"a": one}, 1), may_stream=False)
        for one in (torch.ones(64), torch.full((64,), 2.0))
    )
    paths = [next(iter(one.weights.buckets)) for one in (first, second)]
    second.close()
    (held,) = [load_file(Path(path["path"]) / "bucket.safetensors") for path in paths[:1]]  # type: ignore[index,arg-type]
    assert torch.equal(held["a"], torch.ones(64))
    first.close()
    rank.close()
