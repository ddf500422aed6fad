"""Deltas for real SGLang: a process on its host makes whole tensors of them, and it loads those."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import rollout
from engines.http.client import EngineClient
from rollout.core.errors import RolloutError
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.push import host_copies
from rollout.weights.push.host_copies import HostCopies
from tests.engines.embedded import reference
from tests.support import random_deltas
from tests.support.contract import PROMPT
from tests.support.delta_faults import Faults
from tests.support.random_deltas import Tensors
from tests.support.real_policy import RealPolicy, one_engine, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
GREEDY = rollout.SamplingParams(max_new_tokens=8, temperature=0.0)


def checksums(policy: RealPolicy) -> list[Any]:
    return [random_deltas.checksums_of(engine, "sglang") for engine in policy.engines()]


@pytest.mark.usefixtures("known_weights_after")
def test_random_deltas_arrive_with_no_wrong_bit(
    policy: RealPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang has names of its own, so its fingerprints are those after a push of whole tensors."""
    handle = random_deltas.pushed_by_deltas(policy.handle)
    pushed: list[Tensors] = []
    folders: list[str] = []
    rebuild = HostCopies.rebuild

    def noted(copies: HostCopies, *bucket: Any) -> str:
        folders.append(rebuild(copies, *bucket))
        return folders[-1]

    monkeypatch.setattr(host_copies.HostCopies, "rebuild", noted)
    found = []

    def held(tensors: Tensors) -> None:
        pushed.append(tensors)
        found.append(checksums(policy))

    num = random_deltas.check(handle, dict(policy.next_tensors()), held)
    assert num >= random_deltas.NUM
    assert any(os.path.isdir(folder) for folder in folders if folder)
    for tensors, by_delta in zip(pushed[-3:], found[-3:], strict=True):
        policy.handle.push(tensors).result(120)
        assert checksums(policy) == by_delta


@pytest.mark.chaos
def test_deltas_of_experts_arrive_and_are_computed_with(tmp_path: Path) -> None:
    """SGLang joins the experts of a layer; its answer is that of transformers.

    ``make test-chaos PYTEST_ARGS=tests/end_to_end/sglang/test_deltas.py``; the short one is of
    embedded engines, in ``test_delta_pushes.py``.
    """
    model = make_tiny_model(tmp_path / "moe", "qwen3_moe")
    tensors = load_file(model / "model.safetensors")
    assert any(".experts.0." in name for name in tensors)
    with launch_local(real_config(model, tmp_path, {"main": one_engine()})) as deployment:
        whole = deployment["policy"]
        by_delta = random_deltas.pushed_by_deltas(whole)
        pushed: list[Tensors] = []
        random_deltas.check(by_delta, tensors, pushed.append, 100)
        (engine,) = random_deltas.engines_of(whole)
        found = random_deltas.checksums_of(engine, "sglang")
        save_file(pushed[-1], model / "model.safetensors", metadata={"format": "pt"})
        reply = whole.generate(list(PROMPT), GREEDY).result(60)
        assert list(reply.output_ids) == reference.greedy(model, list(PROMPT), max_new_tokens=8)
        whole.push(pushed[-1]).result(120)
        assert random_deltas.checksums_of(engine, "sglang") == found


def check_comes_back(policy: RealPolicy, handle: ServerHandle, tensors: Tensors) -> None:
    """Fenced, and what serves after the next push are the whole tensors."""
    assert all(engine.fence_reason for engine in policy.engines())
    report = handle.push(tensors).result(300)
    assert random_deltas.sent(report).route == "tensor"
    assert policy.is_whole()
    found = checksums(policy)
    policy.handle.push(tensors).result(120)
    assert checksums(policy) == found


@pytest.mark.usefixtures("known_weights_after")
def test_an_engine_whose_host_lost_a_delta_loads_nothing_and_comes_back_with_whole_tensors(
    policy: RealPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = random_deltas.pushed_by_deltas(policy.handle, bucket_bytes=20_000)
    tensors: Any = dict(policy.next_tensors())
    handle.push(tensors).result(120)
    before = checksums(policy)
    rebuild, lost = HostCopies.rebuild, []

    def lossy(copies: HostCopies, payload: bytes, *more: Any) -> str:
        if more[-1] is None:  # not the last
            lost.append(payload)
            return ""
        assert [random_deltas.checksums_of(one, "sglang") for one in engines] == before
        return rebuild(copies, payload, *more)

    engines = policy.engines()
    tensors = random_deltas.changed(tensors, 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(host_copies.HostCopies, "rebuild", lossy)
        with pytest.raises(RolloutError, match="is not what the trainer wrote; the engine did not"):
            handle.push(tensors).result(120)
    assert lost
    check_comes_back(policy, handle, tensors)


@pytest.mark.chaos
@pytest.mark.usefixtures("known_weights_after")
def test_an_engine_that_dies_while_it_loads_what_deltas_changed_comes_back_with_whole_tensors(
    policy: RealPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the test of experts.  The last file that it loads is not there yet when it is killed."""
    faults = Faults()
    around = faults.around(EngineClient.update_weights_from_disk)
    monkeypatch.setattr(EngineClient, "update_weights_from_disk", around)
    handle = random_deltas.pushed_by_deltas(policy.handle)
    tensors: Any = dict(policy.next_tensors())
    handle.push(tensors).result(120)
    tensors = random_deltas.changed(tensors, 0.01)
    faults.fault, faults.engines = "killed", policy.engines()
    with pytest.raises(RolloutError):
        handle.push(tensors).result(120)
    faults.fault = ""
    assert faults.num_killed == len(faults.engines)
    check_comes_back(policy, handle, tensors)
