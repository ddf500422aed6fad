"""Broadcasts to vLLM's workers: a trainer in a process of its own, over gloo, and no vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.tensors.collective import groups
from engines.tensors.collective.bucket import BroadcastRefused
from engines.vllm_plugin.pushed_broadcasts import PushedBroadcasts
from engines.vllm_plugin.worker import WorkerExtension
from tests.support.group_trainer import tensors

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(90)]

ROOT = Path(__file__).parents[3]
SEED = 3
NEW = tensors(SEED)


class Worker(WorkerExtension):
    """The rank of a server that follows ``rank`` others."""

    def __init__(self, broadcasts: Any, rank: int = 0) -> None:
        self.weight_transfer_engine = SimpleNamespace(broadcasts=broadcasts)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=rank))


@pytest.fixture
def broadcasts() -> Iterator[PushedBroadcasts]:
    made = PushedBroadcasts(torch.device("cpu"))
    yield made
    made.leave_all()


@contextmanager
def trainer(broadcasts: PushedBroadcasts, name: str) -> Iterator[subprocess.Popen[str]]:
    """One that this process has joined, as the worker does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.group_trainer", name, str(SEED), "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        terms = json.loads(process.stdout.readline())
        worker = Worker(broadcasts)
        joined = worker.rollout_join_group(rank_offset=1, group_name=name, backend="gloo", **terms)
        assert joined == {"error": ""}
        yield process
    finally:
        process.kill()
        process.communicate()


def send(process: subprocess.Popen[str], how: str) -> None:
    assert process.stdin is not None
    process.stdin.write(how + "\n")
    process.stdin.flush()


def asked(name: str, how: str = "flat") -> dict[str, Any]:
    return {
        "names": list(NEW),
        "dtypes": [str(one.dtype).removeprefix("torch.") for one in NEW.values()],
        "shapes": [list(one.shape) for one in NEW.values()],
        "group_name": name,
        "load_format": "flattened_bucket" if how == "flat" else None,
    }


def accept(shapes: Mapping[str, Sequence[int]]) -> None:
    assert {name: tuple(shape) for name, shape in shapes.items()} == {
        name: tuple(one.shape) for name, one in NEW.items()
    }


def check_received(found: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == NEW.keys()
    assert all(torch.equal(found[name], one) for name, one in NEW.items())


def test_buckets_of_both_forms_come_through_one_group_into_the_same_memory(
    broadcasts: PushedBroadcasts,
) -> None:
    with trainer(broadcasts, "both") as process:
        places = []
        for how in ("apart", "flat", "flat"):
            send(process, how)
            found = broadcasts.receive(asked("both", how), accept)
            check_received(found)
            places.append(found["wide"].data_ptr())
            del found
            broadcasts.done()
        assert len(set(places)) == 1
        assert broadcasts.groups.names() == ["both"]


def test_each_worker_of_a_server_has_a_rank_of_its_own() -> None:
    joined: list[dict[str, Any]] = []
    double = SimpleNamespace(groups=SimpleNamespace(join=lambda **where: joined.append(where)))
    for rank in range(2):
        worker = Worker(double, rank)
        worker.rollout_join_group(rank_offset=3, group_name="g", backend="nccl", world_size=5)
    assert [where.pop("rank") for where in joined] == [3, 4]
    assert joined[0] == joined[1] == {"group_name": "g", "backend": "nccl", "world_size": 5}


def test_a_bucket_that_the_model_does_not_take_is_refused_before_anything_is_received(
    broadcasts: PushedBroadcasts,
) -> None:
    def refuse(shapes: Mapping[str, Sequence[int]]) -> None:
        raise ValueError(f"no tensor {next(iter(shapes))}")

    with trainer(broadcasts, "fits") as process:
        with pytest.raises(ValueError, match="no tensor wide"):
            broadcasts.receive(asked("fits"), refuse)
        twice = asked("fits") | {"names": ["wide", "plain", "plain"]}
        with pytest.raises(BroadcastRefused, match="two tensors have the same name"):
            broadcasts.receive(twice, accept)
        with pytest.raises(BroadcastRefused, match="no weight update group 'other'"):
            broadcasts.receive(asked("other"), accept)
        send(process, "flat")
        check_received(broadcasts.receive(asked("fits"), accept))


def test_a_trainer_that_leaves_before_it_sends_ends_the_receive_and_the_next_group_works(
    broadcasts: PushedBroadcasts,
) -> None:
    with trainer(broadcasts, "left") as process:
        process.kill()
        began = time.monotonic()
        with pytest.raises(BroadcastRefused, match="'left'"):
            broadcasts.receive(asked("left"), accept)
        assert time.monotonic() - began < 10
        assert broadcasts.groups.names() == []
    with trainer(broadcasts, "left") as process:
        send(process, "flat")
        check_received(broadcasts.receive(asked("left"), accept))


def test_a_trainer_that_does_not_send_in_time_ends_the_receive_and_the_group(
    broadcasts: PushedBroadcasts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "RECEIVE_TIMEOUT_S", 1.0)
    with trainer(broadcasts, "late"):
        began = time.monotonic()
        with pytest.raises(BroadcastRefused, match=r"broadcast in 'late' failed: .*; it was left"):
            broadcasts.receive(asked("late"), accept)
        assert 1 <= time.monotonic() - began < 10
        assert broadcasts.groups.names() == []


def test_a_group_whose_other_rank_does_not_come_is_not_joined(
    broadcasts: PushedBroadcasts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "JOIN_TIMEOUT_S", 1.0)
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    where = {"master_address": "127.0.0.1", "master_port": store.port, "world_size": 2}
    began = time.monotonic()
    joined = Worker(broadcasts).rollout_join_group(
        rank_offset=1, group_name="alone", backend="gloo", **where
    )
    assert "could not join weight update group 'alone' within 1 s" in joined["error"]
    assert time.monotonic() - began < 10
    assert broadcasts.groups.names() == []
    del store
    with trainer(broadcasts, "alone") as process:  # the name is free
        send(process, "flat")
        check_received(broadcasts.receive(asked("alone"), accept))


def test_all_groups_are_left_at_the_end(broadcasts: PushedBroadcasts) -> None:
    with trainer(broadcasts, "one"), trainer(broadcasts, "two"):
        assert broadcasts.groups.names() == ["one", "two"]
        broadcasts.leave_all()
        assert broadcasts.groups.names() == []
        left = Worker(broadcasts).rollout_leave_group(group_name="one")
        assert "no weight update group 'one'" in left["error"]


def test_what_a_worker_fails_with_is_its_answer() -> None:
    """vLLM would take the next worker's answer for that to the next call."""

    class Failing(Worker):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            raise ValueError(*update_info["broadcast"]["names"])

    assert Failing(None).rollout_receive_bucket(names=["no room"]) == {"error": "no room"}
    assert Failing(None).rollout_receive_bucket(names=[]) == {"error": "ValueError()"}
