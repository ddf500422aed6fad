"""One sender broadcasts to 1, 2 and 8 engines, one of which dies before or in a push."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Collection, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout import RolloutConfig, launch
from rollout.core.errors import PhaseFailed
from rollout.core.pending import Pending
from rollout.core.types import EngineStatus, StepReport
from rollout.runtime.handle import ServerHandle
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.tensors import bytes_fingerprint
from tests.support.engine_keys import request_to
from tests.support.kept_groups import kept_group
from tests.support.processes import wait_until

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(300)]
GROUP_TIMEOUT_S = 20


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


@pytest.fixture(scope="module", params=[1, 2, 8])
def policy(
    request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerHandle]:
    engine = {"kind": "embedded", "cpus": 0.1}
    server = {
        "model_path": str(model_path),
        "groups": {"main": {"num_engines": request.param, "engine": engine}},
        "health": {"probe_interval_s": 0.5, "backoff_s": 0.1, "max_restarts": 100},
        "weights": {
            "transport": "distributed",
            "bucket_bytes": 100_000,
            "group_timeout_s": GROUP_TIMEOUT_S,
        },
    }
    folder = tmp_path_factory.mktemp("logs")
    config = RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": server}})
    with launch(config, backend="local") as deployment:
        yield deployment["policy"]


def all_engines(policy: ServerHandle) -> tuple[EngineStatus, ...]:
    (group,) = policy.status().result(30).groups
    return group.engines


def living(policy: ServerHandle) -> list[EngineStatus]:
    return [one for one in all_engines(policy) if one.pid and not one.fence_reason]


def asked(engine: EngineStatus, question: str) -> Any:
    with urllib.request.urlopen(request_to(engine, f"/{question}"), timeout=30) as answer:
        return json.load(answer)


def drawn(model_path: Path) -> dict[str, torch.Tensor]:
    held = load_file(model_path / "model.safetensors")
    return {name: torch.randn_like(one) for name, one in held.items()}


def check_held(
    policy: ServerHandle, tensors: dict[str, torch.Tensor], without: Collection[str] = ()
) -> None:
    """All engines that got the push have the tensors, and are in the group that is kept."""
    wanted = {name: bytes_fingerprint(name, one) for name, one in tensors.items()}
    group = kept_group(policy._pushes.idle_group)
    for engine in all_engines(policy):
        is_out = engine.fence_reason or engine.is_stale
        if engine.engine_id not in without and not is_out:
            found = asked(engine, "weights_checker")["ranks"][0]["checksums"]
            assert found == {name: wanted[name] for name in found}
            names = asked(engine, "server_info")["weights_update_groups"]
            assert names == ([group] if group else [])


def pushed(policy: ServerHandle, model_path: Path) -> str:
    """New weights to the engines that live; the group that they came through."""
    new = drawn(model_path)
    policy.push(new).result(60)
    check_held(policy, new)
    return kept_group(policy._pushes.idle_group)


def pushed_to_all(policy: ServerHandle, model_path: Path) -> str:
    assert wait_until(lambda: len(living(policy)) == len(all_engines(policy)), 60)
    return pushed(policy, model_path)


def failed_in(pending: Pending[StepReport]) -> tuple[set[str], bool]:
    """The engines that fail in a push, and whether the others have it."""
    try:
        reports = pending.result(60).reports
    except PhaseFailed as error:
        return {one.engine_id for one in error.failures}, False
    return {one.engine_id for report in reports for one in report.failures}, True


def test_one_group_has_all_engines_and_is_kept(policy: ServerHandle, model_path: Path) -> None:
    assert len({pushed_to_all(policy, model_path) for _ in range(3)}) == 1


def test_an_engine_that_dies_before_a_push_is_named_and_the_others_get_it(
    policy: ServerHandle, model_path: Path
) -> None:
    before = pushed_to_all(policy, model_path)
    dead = living(policy)[-1]
    assert dead.pid is not None
    os.kill(dead.pid, signal.SIGKILL)
    new, began = drawn(model_path), time.monotonic()
    failed, is_served = failed_in(policy.push(new))
    assert time.monotonic() - began < GROUP_TIMEOUT_S
    assert failed == {dead.engine_id}
    assert is_served is (len(all_engines(policy)) > 1)
    if is_served:
        check_held(policy, new, without=failed)
    after = pushed_to_all(policy, model_path)
    assert after != before
    assert pushed_to_all(policy, model_path) == after


def test_an_engine_that_dies_in_a_push_is_named_and_the_next_one_makes_a_group(
    policy: ServerHandle, model_path: Path
) -> None:
    before = pushed_to_all(policy, model_path)
    dead = living(policy)[-1]
    assert dead.pid is not None
    pid, new, calls = dead.pid, drawn(model_path), count(1)
    last = list(new)[-1]

    def killing(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        # The first time its values are checked, before an engine is called.
        if name == last and tensor.device.type != "meta" and next(calls) == 2:
            os.kill(pid, signal.SIGKILL)
        yield name, tensor

    began = time.monotonic()
    failed, is_served = failed_in(policy.push(new, name_map=killing))
    assert time.monotonic() - began < GROUP_TIMEOUT_S
    assert dead.engine_id in failed
    if is_served:
        check_held(policy, new, without=failed)
    # With the dead one others may have been fenced, for they hold half of a push; as long as the
    # group stands still, no more are started again than it needs.
    assert wait_until(lambda: any(one.pid != pid for one in living(policy)), 60)
    assert pushed(policy, model_path) not in ("", before)
    after = pushed_to_all(policy, model_path)
    assert after != before
    assert pushed_to_all(policy, model_path) == after
