"""The group of a broadcast is kept while its engines are the same, and made again otherwise."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rollout import RolloutConfig, launch
from rollout.core.errors import RolloutError
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.tensors import bytes_fingerprint
from tests.support.engine_keys import request_to
from tests.support.kept_groups import kept_group
from tests.support.kinds import chaos_for
from tests.support.processes import wait_until

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(120)]
# With Ray in ``make test-chaos PYTEST_ARGS=tests/end_to_end/test_kept_group.py``.
BY_RAY_IN_CHAOS = chaos_for("ray")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


@pytest.fixture(
    scope="module",
    params=["local", pytest.param("ray", marks=pytest.mark.ray)],
)
def policy(
    request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerHandle]:
    config = {
        "log_dir": str(tmp_path_factory.mktemp("logs")),
        "servers": {
            "policy": {
                "model_path": str(model_path),
                "groups": {"main": {"num_engines": 2, "engine": {"kind": "embedded", "cpus": 0.5}}},
                "health": {"probe_interval_s": 0.5, "probe_timeout_s": 1.0},
                "weights": {"transport": "distributed", "bucket_bytes": 100_000},
                "lifecycle": {"command_timeout_s": 16},
            }
        },
    }
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    with launch(RolloutConfig.from_dict(config), backend=request.param) as deployment:
        yield deployment["policy"]


@pytest.fixture
def push(policy: ServerHandle, model_path: Path) -> Callable[[], str]:
    """New weights to all, held against what each engine says; the group they came through."""
    held = load_file(model_path / "model.safetensors")

    def pushed() -> str:
        new = {name: torch.randn_like(one) for name, one in held.items()}
        policy.push(new).result(60)
        wanted = {name: bytes_fingerprint(name, one) for name, one in new.items()}
        # An engine that has joined since then serves with the next push only.
        for engine in (one for one in engines(policy) if not one.is_stale):
            found = asked(engine, "weights_checker")["ranks"][0]["checksums"]
            assert found == {name: wanted[name] for name in found}
        return kept_group(policy._pushes.idle_group)

    return pushed


def engines(policy: ServerHandle) -> list[EngineStatus]:
    (group,) = policy.status().result(30).groups
    return [one for one in group.engines if not one.fence_reason]


def asked(engine: EngineStatus, question: str) -> Any:
    with urllib.request.urlopen(request_to(engine, f"/{question}"), timeout=30) as answer:
        return json.load(answer)


def groups(policy: ServerHandle) -> list[list[str]]:
    """What each engine that serves says it is in."""
    return [asked(one, "server_info")["weights_update_groups"] for one in engines(policy)]


def test_the_group_of_one_push_is_that_of_the_next(
    policy: ServerHandle, push: Callable[[], str]
) -> None:
    name = push()
    processes = [psutil.Process(), *(psutil.Process(one.pid) for one in engines(policy))]
    before = [one.num_fds() for one in processes]
    assert [push() for _ in range(5)] == [name] * 5
    assert groups(policy) == [[name], [name]]
    # Connections of others come and go; one of each push's would be five.
    more = [one.num_fds() - were for one, were in zip(processes, before, strict=True)]
    assert all(one < 5 for one in more), more


@BY_RAY_IN_CHAOS
def test_pushes_of_the_handle_and_of_its_pusher_go_through_one_group(
    policy: ServerHandle, push: Callable[[], str], model_path: Path
) -> None:
    name = push()
    with policy.pusher() as pusher:
        pusher.push(load_file(model_path / "model.safetensors"))
        assert groups(policy) == [[name], [name]]
        assert push() == name
        assert groups(policy) == [[name], [name]]
    with policy.pusher() as another:  # the first one has left it
        another.push(load_file(model_path / "model.safetensors"))
        name = push()
        assert groups(policy) == [[name], [name]]


@BY_RAY_IN_CHAOS
def test_an_engine_that_was_killed_between_two_pushes_costs_a_group_and_no_more(
    policy: ServerHandle, push: Callable[[], str]
) -> None:
    """A push right after its death, before that is noticed, and another after its restart."""
    name = push()
    dead = engines(policy)[1]
    assert dead.pid is not None
    os.kill(dead.pid, signal.SIGKILL)
    without = push()
    assert without not in ("", name)
    assert groups(policy)[0] == [without]

    def is_back() -> bool:
        return [one.pid for one in engines(policy)][1:] not in ([], [dead.pid])

    assert wait_until(is_back, 60)
    with_it = push()
    assert with_it not in ("", name, without)
    assert groups(policy) == [[with_it], [with_it]]
    assert push() == with_it


@BY_RAY_IN_CHAOS
def test_an_engine_that_stands_still_between_two_pushes_is_left_behind(
    policy: ServerHandle, push: Callable[[], str]
) -> None:
    """Its connections stay open, so only a deadline shows it."""
    name = push()
    stopped = engines(policy)[1]
    assert stopped.pid is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    without = push()
    assert without not in ("", name)
    assert groups(policy)[0] == [without]
    assert wait_until(lambda: len(engines(policy)) == 2, 60)
    assert engines(policy)[1].pid != stopped.pid
    with_it = push()
    assert groups(policy) == [[with_it], [with_it]]


@BY_RAY_IN_CHAOS
def test_an_engine_that_is_removed_leaves_and_the_others_make_another(
    policy: ServerHandle, push: Callable[[], str]
) -> None:
    name = push()
    away = engines(policy)[1]
    policy.engines.remove(away.engine_id).result(60)
    without = push()
    assert without != name
    assert groups(policy) == [[without]]
    policy.engines.add(away.engine_id).result(60)
    with_it = push()
    assert with_it != without
    assert groups(policy) == [[with_it], [with_it]]


@BY_RAY_IN_CHAOS
def test_an_engine_that_was_told_to_leave_behind_our_back_is_asked_to_join_again(
    policy: ServerHandle, push: Callable[[], str]
) -> None:
    name = push()
    body = json.dumps({"group_name": name}).encode()
    leave = request_to(engines(policy)[1], "/destroy_weights_update_group", body)
    with urllib.request.urlopen(leave, timeout=30) as answer:
        assert answer.status == 200
    another = push()
    assert another != name
    assert groups(policy) == [[another], [another]]


@BY_RAY_IN_CHAOS
def test_a_push_that_breaks_off_leaves_no_group_and_the_next_makes_one(
    policy: ServerHandle, push: Callable[[], str], model_path: Path
) -> None:
    name = push()
    weights = load_file(model_path / "model.safetensors")
    last, calls = list(weights)[-1], count(1)

    def breaks_off(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        # The first time its values are checked, before an engine is called.
        if name == last and tensor.device.type != "meta" and next(calls) == 2:
            raise RuntimeError("out of memory")
        yield name, tensor

    with pytest.raises(RolloutError, match="out of memory"):
        policy.push(weights, name_map=breaks_off).result(60)
    assert kept_group(policy._pushes.idle_group) == ""
    assert groups(policy) == [[], []]
    assert push() not in ("", name)


@BY_RAY_IN_CHAOS
def test_an_engine_that_is_killed_in_a_push_ends_it_at_once(
    policy: ServerHandle, push: Callable[[], str], model_path: Path
) -> None:
    """Before its last bucket, in a group that has served other pushes."""
    name = push()
    assert name
    weights = load_file(model_path / "model.safetensors")
    last, dead, calls = list(weights)[-1], engines(policy)[1], count(1)
    assert dead.pid is not None
    pid = dead.pid

    def killing(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if name == last and tensor.device.type != "meta" and next(calls) == 2:
            os.kill(pid, signal.SIGKILL)
        yield name, tensor

    began = time.monotonic()
    with suppress(RolloutError):  # the trainer's end finds out first, or the other engine does not
        policy.push(weights, name_map=killing).result(60)
    assert time.monotonic() - began < 20
    # With the dead one the other may have been fenced, for it holds half of a push; as long as the
    # group stands still, no more are started again than it needs.
    assert wait_until(lambda: {one.pid for one in engines(policy)} - {pid} != set(), 60)
    another = push()
    assert another not in ("", name)
    assert wait_until(lambda: len(engines(policy)) == 2, 60)
    push()
    assert len(set(map(tuple, groups(policy)))) == 1


def test_with_the_trainers_end_the_engines_end_is_gone(
    policy: ServerHandle, push: Callable[[], str]
) -> None:
    name = push()
    assert groups(policy) == [[name], [name]]
    policy.close()
    assert wait_until(lambda: groups(policy) == [[], []], 10)
    assert not [one for one in threading.enumerate() if one.name.startswith("push-stream-")]
    assert push() != name
