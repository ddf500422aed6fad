"""The trainer's turn between the push and the KV cache, on fakes whose GPUs it fills."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeLauncher
from engines.launch import EngineSpec
from engines.protocol import Endpoint, MemoryTag
from rollout.config import RolloutConfig
from rollout.core.errors import LifecycleError
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.builders import push, write_checkpoint

MIB = 2**20
PER_TAG = 300 * MIB
TOTAL = 2 * len(MemoryTag) * PER_TAG
# Weights take 300 MiB, the KV cache and the CUDA graphs 600 MiB more.
TRAINER = TOTAL - 400 * MIB
ONLOAD = ["onload_weights", "update_weights", "verify", "onload_kv", "continue_generation"]


class Trainer:
    """What the trainer holds on the GPU of each engine."""

    def __init__(self, launcher: FakeLauncher) -> None:
        self._launcher = launcher
        self.threads: list[threading.Thread] = []
        self.hold(TRAINER)

    def hold(self, num_bytes: int) -> None:
        for process in self._launcher.processes.values():
            process.gpus.others = num_bytes

    def free(self) -> None:
        self.threads.append(threading.current_thread())
        self.hold(0)


@contextmanager
def launched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *servers: str
) -> Iterator[tuple[DeploymentHandle, FakeLauncher]]:
    """Offloaded servers of one engine each, on a GPU of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def make(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
        memory = {"memory_bytes": len(MemoryTag) * PER_TAG, "reports_memory": True}
        return FakeEngine(spec.engine_id, endpoint=endpoint, **memory)

    launcher = FakeLauncher(make)
    of_server: dict[str, Any] = {
        "model_path": write_checkpoint(folder),
        "health": {"recover": False},
    }
    config = RolloutConfig.from_dict(
        {
            "log_dir": str(folder / "logs"),
            "servers": {
                name: of_server | {"groups": {name: {"engine": {"kind": "fake", "gpus": 1}}}}
                for name in servers
            },
        }
    )
    with launch_local(config, launcher=launcher, connect=launcher.connect) as deployment:
        yield deployment, launcher


def test_without_its_turn_the_trainer_is_in_the_way_and_the_refusal_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launched(tmp_path, monkeypatch, "policy") as (deployment, launcher):
        policy = deployment["policy"]
        policy.offload().result(30)
        trainer = Trainer(launcher)
        with pytest.raises(LifecycleError, match="kv_cache and cuda_graph need 600 MiB") as caught:
            policy.push(push(1)).result(30)
        assert "has 100 MiB free" in str(caught.value)
        assert "pid 77 (trainer) holds 1.37 GiB, free it" in str(caught.value)
        assert policy.status().result(30).phase == "verified"
        # The trainer takes its turn now, and the same onload goes on.
        assert policy.serve(before_kv=trainer.free).result(30).weight_version == 1
        assert policy.status().result(30).gate == "open"


def test_in_its_turn_the_trainer_frees_what_the_kv_cache_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launched(tmp_path, monkeypatch, "policy") as (deployment, launcher):
        policy = deployment["policy"]
        policy.offload().result(30)
        trainer = Trainer(launcher)
        report = policy.push(push(1), before_kv=trainer.free).result(30)
        assert (list(report.phase_s), report.weight_version) == (ONLOAD, 1)
        assert trainer.threads == [threading.current_thread()]
        assert policy.status().result(30).phase == "serving"


async def test_in_a_task_the_turn_comes_before_the_kv_cache_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launched(tmp_path, monkeypatch, "policy") as (deployment, launcher):
        policy = deployment["policy"]
        made = push(1)
        async with policy.offloaded(lambda: made, before_kv=lambda: trainer.free()) as window:
            trainer = Trainer(launcher)
        assert list(window.report.phase_s)[-5:] == ONLOAD
        assert trainer.threads == [threading.current_thread()]
        assert (await policy.status()).weight_version == 1


def test_a_window_gives_the_trainer_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launched(tmp_path, monkeypatch, "policy") as (deployment, launcher):
        policy = deployment["policy"]
        made = push(1)
        with policy.offloaded(lambda: made, before_kv=lambda: trainer.free()) as window:
            trainer = Trainer(launcher)
        assert (window.report.weight_version, len(trainer.threads)) == (1, 1)


@pytest.mark.parametrize("last_step", ["onload", "single commands"])
def test_a_turn_that_fails_leaves_weights_without_kv_and_the_next_onload_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_step: str
) -> None:
    with launched(tmp_path, monkeypatch, "policy") as (deployment, launcher):
        policy = deployment["policy"]
        policy.offload().result(30)
        trainer = Trainer(launcher)

        def fail() -> None:
            raise RuntimeError("the optimizer does not fit on the host")

        with pytest.raises(RuntimeError, match="the optimizer does not fit") as caught:
            policy.push(push(1), before_kv=fail).result(30)
        (note,) = caught.value.__notes__
        assert "hold verified weights, have no KV cache and get no requests" in note
        status = policy.status().result(30)
        assert (status.phase, status.gate) == ("verified", "holding")
        engine = launcher["policy-0"]
        assert engine.released == {MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH}
        trainer.free()
        if last_step == "onload":
            policy.serve().result(30)
        else:
            policy.phases.onload_kv().result(30)
            policy.phases.continue_generation().result(30)
        status = policy.status().result(30)
        assert (status.phase, status.gate, status.weight_version) == ("serving", "open", 1)


def test_all_servers_are_verified_before_the_one_turn_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launched(tmp_path, monkeypatch, "policy", "critic") as (deployment, launcher):
        deployment.offload().result(30)
        trainer = Trainer(launcher)
        phases: list[str] = []

        def turn() -> None:
            phases.extend(one.phase for one in deployment.status().result(30).values())
            trainer.free()

        pushes = {"policy": push(1), "critic": push(1)}
        reports = deployment.push(pushes, before_kv=turn).result(30)
        assert phases == ["verified", "verified"]
        for report in reports.values():
            assert list(report.phase_s) == ONLOAD
        assert set(reports) == set(pushes)
        assert len(trainer.threads) == 1


async def _async_turn() -> None:
    raise AssertionError("never called")


@pytest.mark.parametrize(
    ("before_kv", "found"),
    [(5, "a int"), (_async_turn, "an async function")],
    ids=["number", "async function"],
)
def test_what_cannot_take_the_turn_is_refused_before_anything_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_kv: Any, found: str
) -> None:
    with launched(tmp_path, monkeypatch, "policy") as (deployment, launcher):
        policy = deployment["policy"]
        for call in (policy.serve, policy.offloaded, deployment.serve):
            with pytest.raises(TypeError, match=f"takes a plain function .* not {found}"):
                call(before_kv=before_kv)
        assert policy.status().result(30).phase == "serving"
        assert "pause_generation" not in launcher["policy-0"].operations()
