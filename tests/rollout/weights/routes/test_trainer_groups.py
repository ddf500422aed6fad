"""The trainer's end of pushes by broadcast: which group, in which form, and when it is let go.

Groups here are of the trainer alone (engines of no ranks); those with engines are in
``tests/end_to_end/test_kept_group.py``.  Needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rollout.config import ServerConfig
from rollout.core.errors import ConfigError
from rollout.weights.routes.nccl import backend_of, check_nccl, why_cumem_differs
from rollout.weights.routes.route import BroadcastMember, PushTerms, StreamedBucket
from tests.support.kept_groups import kept_group
from tests.support.still_server import server_config

torch = pytest.importorskip("torch")
from torch.distributed import distributed_c10d  # noqa: E402

from rollout.weights.routes.trainer_groups import (  # noqa: E402
    BroadcastPush,
    BroadcastRoot,
    IdleGroup,
)
from rollout.weights.tensors import PlannedSource  # noqa: E402  only where there is torch

pytestmark = pytest.mark.embedded
ENGINES = (
    BroadcastMember("a", 0, "pa"),
    BroadcastMember("b", 0, "pb"),
)


@pytest.fixture
def idle() -> Iterator[IdleGroup]:
    group = IdleGroup()
    yield group
    group.close()


def a_broadcast(idle: IdleGroup) -> BroadcastPush:
    config = server_config(group_timeout_s=10)
    terms = PushTerms(1, fingerprints="xxh3")
    return BroadcastPush(config, terms, "127.0.0.1", idle)


def on_gpus(idle: IdleGroup, *, offloads: bool = False, **weights: Any) -> BroadcastPush:
    """Of tensors on a GPU, to an SGLang engine with one."""
    config = beside_trainer(offloads=offloads, **weights)
    return BroadcastPush(config, PushTerms(1), "127.0.0.1", idle, is_on_cuda=True)


def beside_trainer(*, offloads: bool = False, **weights: Any) -> ServerConfig:
    """With an SGLang engine that has a GPU, by default of its own."""
    group = {"needs_offload": offloads, "engine": {"kind": "sglang", "gpus": 1}}
    values = {"model_path": "/model", "groups": {"main": group}, "weights": weights}
    return ServerConfig.model_validate(values)


def weights_of(**tensors: torch.Tensor) -> PlannedSource:
    return PlannedSource(tensors or {"x": torch.ones(2)})


def buckets_of(broadcast: BroadcastPush, weights: PlannedSource) -> Iterator[StreamedBucket]:
    broadcast.join()
    for pairs, _ in weights.buckets(256 << 20):
        yield from broadcast.parts(pairs)


def sent(
    idle: IdleGroup, members: tuple[BroadcastMember, ...] = ENGINES, *, well: bool = True
) -> Mapping[str, Any]:
    """One push through any group; returns its terms."""
    broadcast = a_broadcast(idle)
    terms = broadcast.terms(members)
    for bucket in buckets_of(broadcast, weights_of()):
        assert bucket.then is not None
        bucket.then()
    broadcast.ended(well)
    return terms


def holding(
    name: str, members: tuple[BroadcastMember, ...] = ENGINES
) -> tuple[BroadcastMember, ...]:
    return tuple(replace(member, group=name) for member in members)


def test_nccl_with_engines_whose_memory_differs_is_refused_before_anything_is_sent(
    idle: IdleGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    with pytest.raises(ConfigError, match="NCCL_CUMEM_ENABLE is not set in the trainer, and the"):
        on_gpus(idle, transport="distributed", backend="nccl")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    on_gpus(idle, transport="distributed", backend="nccl")


def test_nccl_by_name_to_engines_on_the_trainers_gpus_is_refused_before_anything_is_sent(
    idle: IdleGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of one group on one GPU end both processes' ends of it, in NCCL itself."""
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    with pytest.raises(ConfigError, match="nccl: group main: it offloads"):
        on_gpus(idle, offloads=True, backend="nccl")


def test_auto_says_why_tensors_on_a_gpu_go_by_gloo(
    idle: IdleGroup, caplog: pytest.LogCaptureFixture
) -> None:
    push = on_gpus(idle, offloads=True)
    assert push.terms(ENGINES)["backend"] == "gloo"
    push.ended(is_whole=False)
    assert "by gloo, through host memory: group main: it offloads" in caplog.text


def test_the_same_engines_are_sent_to_through_the_same_group(idle: IdleGroup) -> None:
    first = sent(idle)
    assert first["is_new"]
    assert first["keeps"]
    name = first["group_name"]
    again = sent(idle, holding(name))
    assert (again["is_new"], again["group_name"], again["over"]) == (False, name, "")
    assert kept_group(idle) == name


@pytest.mark.parametrize(
    "now",
    [
        lambda name: holding(name)[:1],
        lambda name: (*holding(name), BroadcastMember("c", 0, "pc", name)),
        lambda name: (holding(name)[0], replace(holding(name)[1], process="restarted")),
        lambda name: (holding(name)[0], ENGINES[1]),
    ],
    ids=["removed", "added", "restarted", "left"],
)
def test_others_are_sent_to_through_another_and_told_what_is_over(
    idle: IdleGroup, now: Any
) -> None:
    name = sent(idle)["group_name"]
    other = sent(idle, now(name))
    assert other["is_new"]
    assert other["over"] == name
    assert kept_group(idle) == other["group_name"] != name


def test_a_group_that_was_idle_for_long_is_not_trusted() -> None:
    now = [0.0]
    idle = IdleGroup(clock=lambda: now[0])
    name = sent(idle)["group_name"]
    for _ in range(3):  # each push restarts the idle time
        now[0] += 200
        assert not sent(idle, holding(name))["is_new"]
    now[0] += 250
    other = sent(idle, holding(name))
    assert (other["is_new"], other["over"]) == (True, name)
    idle.close()


def test_engines_of_unknown_processes_are_not_asked_to_stay(idle: IdleGroup) -> None:
    attached = tuple(replace(engine, process="") for engine in ENGINES)
    assert not sent(idle, attached, well=False)["keeps"]
    assert kept_group(idle) == ""


def test_after_a_push_that_failed_nothing_is_kept(idle: IdleGroup) -> None:
    name = sent(idle)["group_name"]
    sent(idle, holding(name), well=False)
    assert kept_group(idle) == ""
    assert sent(idle, holding(name))["is_new"]


def test_a_group_that_comes_back_to_a_closed_place_is_closed() -> None:
    idle = IdleGroup()
    broadcast = a_broadcast(idle)
    broadcast.terms(ENGINES)
    list(buckets_of(broadcast, weights_of()))
    idle.close()
    broadcast.ended(True)
    assert kept_group(idle) == ""
    assert idle.take() is None


def test_a_group_that_the_trainer_ended_with_all_its_others_is_made_anew(idle: IdleGroup) -> None:
    """``torch.distributed.destroy_process_group()``, which means every group of the process."""
    name = sent(idle)["group_name"]
    group = idle.take()
    assert group is not None
    torch.distributed.destroy_process_group(group.root._group)
    idle.put(group)
    assert sent(idle, holding(name))["is_new"]
    group = idle.take()
    assert group is not None
    torch.distributed.destroy_process_group(group.root._group)
    idle.put(group)
    idle.close()


def test_a_push_that_nobody_came_for_leaves_the_kept_group_alone(idle: IdleGroup) -> None:
    name = sent(idle)["group_name"]
    a_broadcast(idle).ended(False)
    assert kept_group(idle) == name


def all_of(
    members: tuple[BroadcastMember, ...] = ENGINES, **tensors: torch.Tensor
) -> list[StreamedBucket]:
    broadcast = a_broadcast(IdleGroup())
    broadcast.terms(members)
    buckets = list(buckets_of(broadcast, weights_of(**tensors)))
    broadcast.ended(False)
    return buckets


def test_small_tensors_go_as_one() -> None:
    tensors = {"half": torch.ones(3).half(), "whole": torch.ones(3)}
    (one,) = all_of(**tensors)
    assert isinstance(one.payload, Mapping)
    assert one.payload["load_format"] == "flattened_bucket"
    assert one.payload["names"] == ["whole", "half"]
    assert one.payload["dtypes"] == ["float32", "float16"]
    assert set(one.fingerprints) == set(tensors)


def test_large_tensors_go_from_where_they_are() -> None:
    (one,) = all_of(a=torch.ones(2 << 20), b=torch.ones(2 << 20))
    assert isinstance(one.payload, Mapping)
    assert "load_format" not in one.payload


def test_only_the_last_part_of_the_last_bucket_is_the_last() -> None:
    one = torch.ones(200_000)
    buckets = all_of(**{f"t{index:03}": one for index in range(100)})
    assert [bucket.is_last for bucket in buckets] == [False, True]
    names = [
        name for one in buckets if isinstance(one.payload, Mapping) for name in one.payload["names"]
    ]
    assert names == [f"t{index:03}" for index in range(100)]


@pytest.mark.parametrize(
    ("wanted", "offloads", "is_on_cuda", "chosen"),
    [
        ("auto", False, True, "nccl"),
        ("auto", False, False, "gloo"),
        ("auto", True, True, "gloo"),
        ("gloo", False, True, "gloo"),
        ("nccl", False, False, "nccl"),
    ],
)
def test_a_broadcast_is_by_nccl_only_where_each_process_has_a_gpu(
    monkeypatch: pytest.MonkeyPatch, wanted: str, offloads: bool, is_on_cuda: bool, chosen: str
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    config = beside_trainer(offloads=offloads, backend=wanted)
    assert backend_of(config, is_on_cuda=is_on_cuda) == chosen


class GroupDouble:
    """An NCCL group, whose first broadcast connects.

    Attributes:
        timeouts_s: of the group when it was made, and of each wait.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timeouts_s: list[float] = []
        patch = monkeypatch.setattr
        patch(distributed_c10d, "_new_process_group_helper", lambda *_, **more: (self, None))
        patch(distributed_c10d, "_set_pg_timeout", lambda timeout, group: self._note(timeout))
        patch(torch.distributed, "broadcast", lambda tensor, **more: self)

    def _note(self, timeout: timedelta) -> None:
        self.timeouts_s.append(timeout.total_seconds())

    def wait(self, timeout: timedelta) -> None:
        self._note(timeout)


@pytest.mark.parametrize(
    ("backend", "first_s"),
    [("nccl", 15), ("gloo", 5)],  # gloo connects when it joins
)
def test_nccl_has_the_time_for_joining_in_its_first_broadcast_too(
    monkeypatch: pytest.MonkeyPatch, backend: str, first_s: float
) -> None:
    group = GroupDouble(monkeypatch)
    root = BroadcastRoot("g", backend, join_timeout_s=10, send_timeout_s=5)
    root.terms(0)
    root.join()
    assert group.timeouts_s == [first_s]
    root.send([torch.ones(1)])
    group.timeouts_s.clear()
    root.send([torch.ones(1)])
    assert group.timeouts_s == [5]
    distributed_c10d._world.pg_group_ranks.pop(group)


@pytest.mark.parametrize(
    ("transport", "has_gpu", "is_far", "refused", "warned"),
    [
        ("distributed", True, False, True, False),
        ("distributed", False, True, False, False),
        ("auto", True, True, False, True),
        ("auto", True, False, False, False),
        ("shared_memory", True, True, False, False),
    ],
)
def test_a_trainer_hears_of_nccls_memory_before_it_has_trained(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transport: str,
    has_gpu: bool,
    is_far: bool,
    refused: bool,
    warned: bool,
) -> None:
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = beside_trainer(transport=transport)
    context = pytest.raises(ConfigError, match="set NCCL_CUMEM_ENABLE=0") if refused else None
    with context or nullcontext():
        check_nccl(config, lambda: is_far)
    assert ("engines on another host would fail: NCCL_CUMEM_ENABLE" in caplog.text) is warned
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    caplog.clear()
    check_nccl(config, lambda: is_far)
    assert not caplog.text


@pytest.mark.parametrize(
    ("own", "engines", "said"),
    [
        ("0", {"main": "0"}, ""),
        ("1", {"main": "1", "attached": None}, ""),
        ("1", {}, ""),
        (None, {}, ""),
        (None, {"main": "0"}, "not set in the trainer, and the engines of group main have 0: set "),
        ("1", {"main": "0"}, "is 1 in the trainer, .* have 0: set NCCL_CUMEM_ENABLE=0 in the env"),
        (
            "0",
            {"a": "0", "b": "1"},
            "group b have 1: set NCCL_CUMEM_ENABLE=1 .* before its process",
        ),
        (None, {"main": None}, "the value of their hosts; SGLang mostly takes 0"),
    ],
)
def test_nccl_has_the_same_memory_on_both_sides(
    own: str | None, engines: dict[str, str | None], said: str
) -> None:
    why = why_cumem_differs(own, engines)
    assert re.search(said, why)
    assert bool(why) is bool(said)
