"""Several servers on the same GPUs, launched without Ray: where they are, and which serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.fake.http_fake import HttpFakeLauncher
from rollout import EngineRank, TrainerSlot
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.builders import push
from tests.support.served_fakes import TIMEOUT_S, stacked_config


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeploymentHandle]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb,GPU-aa")
    with launch_local(stacked_config(tmp_path), launcher=HttpFakeLauncher()) as handle:
        yield handle


def phases(deployment: DeploymentHandle) -> list[str]:
    return [one.phase for one in deployment.status().result(TIMEOUT_S).values()]


def test_each_rank_of_the_trainer_has_its_gpu_and_all_engines_on_it(
    deployment: DeploymentHandle,
) -> None:
    reference = "reference", "main-0"
    assert deployment.trainer_slots == (
        TrainerSlot(
            0,
            None,
            "local",
            "GPU-bb",
            (EngineRank("policy", "main-0", 0), EngineRank(*reference, 0)),
        ),
        TrainerSlot(
            1,
            None,
            "local",
            "GPU-aa",
            (EngineRank("policy", "main-1", 0), EngineRank(*reference, 1)),
        ),
    )
    gpus = {
        (name, engine.engine_id): [gpu.uuid for gpu in engine.gpus]
        for name in deployment
        for engine in deployment[name].status().result(TIMEOUT_S).groups[0].engines
    }
    for slot in deployment.trainer_slots:
        for engine in slot.engines:
            assert gpus[engine.server, engine.engine_id][engine.tp_rank] == f"GPU-{slot.gpu_id}"


def test_a_step_in_which_each_server_has_its_turn(deployment: DeploymentHandle) -> None:
    assert phases(deployment) == ["serving", "offloaded"]
    policy, reference = deployment["policy"], deployment["reference"]
    policy.offload().result(TIMEOUT_S)
    reference.serve().result(TIMEOUT_S)
    assert phases(deployment) == ["offloaded", "serving"]
    reference.offload().result(TIMEOUT_S)
    policy.push(push(1)).result(TIMEOUT_S)
    assert phases(deployment) == ["serving", "offloaded"]
    assert policy.status().result(TIMEOUT_S).weight_version == 1
