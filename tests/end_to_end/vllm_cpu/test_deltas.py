"""Deltas to real vLLM: its worker makes whole tensors of them, and every bit arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.vllm.client import VllmClient
from rollout.core.errors import RolloutError
from tests.support import random_deltas
from tests.support.delta_faults import Faults
from tests.support.engine_keys import client_of
from tests.support.random_deltas import Tensors
from tests.support.real_policy import DEADLINES, RealPolicy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("known_weights_after"),
]


def check_held(policy: RealPolicy, tensors: Tensors) -> None:
    for engine in policy.engines():
        found = random_deltas.checksums_of(engine, "vllm")
        assert found == random_deltas.fingerprints(tensors, found)


def test_random_deltas_arrive_with_no_wrong_bit(policy: RealPolicy) -> None:
    handle = random_deltas.pushed_by_deltas(policy.handle)
    tensors: Any = dict(policy.next_tensors())
    num = random_deltas.check(handle, tensors, lambda now: check_held(policy, now))
    assert num >= random_deltas.NUM


@pytest.mark.parametrize("route", ["disk", "distributed"])
def test_so_they_do_by_another_route(policy: RealPolicy, tmp_path: Path, route: str) -> None:
    settings = {"transport": route, "disk_path": str(tmp_path / "{version}")}
    handle = random_deltas.pushed_by_deltas(policy.handle, **settings)
    tensors: Any = dict(policy.next_tensors())
    random_deltas.check(handle, tensors, lambda now: check_held(policy, now), 20, route)
    assert len(list(tmp_path.iterdir())) == (route == "disk")  # the checkpoint of the first


async def test_a_wrong_delta_is_refused_by_the_engine_and_whole_tensors_follow(
    policy: RealPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    around = faults.around(VllmClient.update_weights_from_tensor)
    monkeypatch.setattr(VllmClient, "update_weights_from_tensor", around)
    client = client_of(policy.engines()[0], VllmClient, deadlines=DEADLINES)

    async def held() -> Any:
        return (await client.weights_checker()).tensors[0]

    pushes = random_deltas.DirectPushes(client, dict(policy.next_tensors()))
    # vLLM publishes a version at the end of a session, so the order in it does not matter.
    await random_deltas.check_faults(pushes, faults, held, harmless=["reordered"])
    await pushes.aclose()


@pytest.mark.parametrize("fault", ["lost", pytest.param("killed", marks=pytest.mark.chaos)])
def test_an_engine_that_lost_a_delta_or_died_in_one_is_fenced_and_comes_back_with_whole_tensors(
    policy: RealPolicy, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """``make test-chaos PYTEST_ARGS=tests/end_to_end/vllm_cpu/test_deltas.py``.

    The short one with ``killed`` is of embedded engines, in ``test_delta_pushes.py``.
    """
    faults = Faults()
    around = faults.around(VllmClient.update_weights_from_tensor)
    monkeypatch.setattr(VllmClient, "update_weights_from_tensor", around)
    handle = random_deltas.pushed_by_deltas(policy.handle)
    tensors: Any = dict(policy.next_tensors())
    handle.push(tensors).result(120)
    tensors, faults.fault = random_deltas.changed(tensors, 0.01), fault
    faults.engines = policy.engines()
    with pytest.raises(RolloutError):
        handle.push(tensors).result(120)
    assert faults.num_done
    assert all(engine.fence_reason for engine in policy.engines())
    faults.fault = ""
    assert random_deltas.sent(handle.push(tensors).result(300)).route == "by_value"
    check_held(policy, tensors)
