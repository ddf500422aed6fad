"""Deltas for real SGLang: a process on its host makes whole tensors of them, and it loads those."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rollout.core.errors import RolloutError
from rollout.weights.push import host_copies
from rollout.weights.push.host_copies import HostCopies
from tests.support import random_deltas
from tests.support.random_deltas import Tensors
from tests.support.real_policy import RealPolicy

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("known_weights_after"),
]


def checksums(policy: RealPolicy) -> list[Any]:
    return [random_deltas.checksums_of(engine, "sglang") for engine in policy.engines()]


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
        policy.handle.serve_weights(tensors).result(120)
        assert checksums(policy) == by_delta


def test_an_engine_whose_host_lost_a_delta_loads_nothing_and_comes_back_with_whole_tensors(
    policy: RealPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = random_deltas.pushed_by_deltas(policy.handle, bucket_bytes=20_000)
    tensors: Any = dict(policy.next_tensors())
    handle.serve_weights(tensors).result(120)
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
            handle.serve_weights(tensors).result(120)
    assert lost
    assert all(engine.fence_reason for engine in policy.engines())
    report = handle.serve_weights(tensors).result(300)
    assert random_deltas.sent(report).route == "tensor"
    found = checksums(policy)
    policy.handle.serve_weights(tensors).result(120)
    assert checksums(policy) == found
