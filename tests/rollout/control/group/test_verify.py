"""Engines that report no comparable fingerprints are verified by log-probs, not fenced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeLauncher, FakeTensor, pack_tensors
from engines.fake.engine.faults import Fault, hang, reject
from engines.launch import EngineSpec
from engines.protocol import Endpoint, ServerInfo, TensorInfo, WeightsReport
from rollout.control.group.server_group import ServerGroup
from rollout.core.errors import PhaseFailed
from rollout.core.types import PhaseReport
from rollout.rules.lifecycle import Command
from rollout.runtime.local import launch_local
from rollout.weights.push.weight_push import WeightPush
from tests.support.builders import TENSOR_NAMES, make_group, manifest, push
from tests.support.served_fakes import engines_of, launched
from tests.support.virtual_time import virtual_time

# SGLang 0.5.23, weight_checker_comparator.py
NO_COMPARABLE = "weight checker has no ComparableWeight for ModelOptFp4LinearMethod"
PROMPTS = {"canary_prompts": [[1, 2, 3], [4, 5]]}


def refusing(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    engine = FakeEngine(
        spec.engine_id, endpoint=endpoint, weights_cpu_backup=spec.weights_cpu_backup
    )
    engine.faults.strike("weights_checker", reject(400, NO_COMPARABLE), times=100)
    return engine


async def started(
    num: int, launcher: FakeLauncher, **more: Any
) -> tuple[ServerGroup, list[FakeEngine]]:
    group, _ = make_group(num, launcher=launcher, **{"verify": PROMPTS, **more})
    await group.start()
    return group, [process.engine for process in launcher.processes.values()]


async def offload(group: ServerGroup) -> None:
    for command in (
        Command.PAUSE_GENERATION,
        Command.FLUSH_CACHE,
        Command.RELEASE_MEMORY_OCCUPATION,
    ):
        await group.run(command)


async def give(group: ServerGroup, sent: WeightPush | None) -> PhaseReport:
    """Onload up to the log-prob check."""
    await group.run(Command.ONLOAD_WEIGHTS)
    if sent is not None:
        await group.run(Command.UPDATE_WEIGHTS, push=sent)
    await group.run(Command.VERIFY, version=0 if sent is None else sent.version)
    await group.run(Command.ONLOAD_KV)
    return await group.run(Command.CONTINUE_GENERATION)


def scribble(engine: FakeEngine) -> None:
    """One tensor is wrong, and nothing says so."""
    tensor = engine.weights.tensors[TENSOR_NAMES[1]]
    engine.weights.write([(tensor.name, FakeTensor(tensor.shape, -1.0))])


async def test_engines_whose_checker_refuses_are_verified_by_log_probs() -> None:
    group, engines = await started(3, FakeLauncher(refusing))
    await offload(group)
    report = await give(group, push(1))
    assert [one.verified_by for one in report.engines] == ["canary"] * 3
    assert not report.failures
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    await group.run(Command.UPDATE_WEIGHTS, push=push(2))
    scribble(engines[1])
    verified = await group.run(Command.VERIFY, version=2)
    assert not verified.failures  # a refusal shows nothing
    await group.run(Command.ONLOAD_KV)
    report = await group.run(Command.CONTINUE_GENERATION)
    assert [one.engine_id for one in report.failures] == ["main-1"]


async def test_weights_with_a_backup_have_their_log_probs_of_the_start_as_reference() -> None:
    group, (engine,) = await started(1, FakeLauncher(refusing), update="frozen")
    await offload(group)
    await give(group, None)
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    scribble(engine)
    await group.run(Command.VERIFY, version=0)
    await group.run(Command.ONLOAD_KV)
    with pytest.raises(PhaseFailed, match="when the weights were the same"):
        await group.run(Command.CONTINUE_GENERATION)
    assert engine.is_dead


@pytest.mark.parametrize("fault", [reject(500, "CUDA error"), hang()])
@virtual_time
async def test_a_checker_that_breaks_otherwise_is_a_failure(fault: Fault) -> None:
    group, (engine,) = await started(1, FakeLauncher())
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    engine.faults.strike("weights_checker", fault)
    with pytest.raises(PhaseFailed, match="verify"):
        await group.run(Command.VERIFY, version=1)
    assert engine.is_dead


async def test_a_checker_that_reported_before_and_refuses_now_is_a_failure() -> None:
    group, (engine,) = await started(1, FakeLauncher())
    await offload(group)
    await give(group, push(1))
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    await group.run(Command.UPDATE_WEIGHTS, push=push(2))
    engine.faults.strike("weights_checker", reject(400, "out of memory"))
    with pytest.raises(PhaseFailed, match="out of memory"):
        await group.run(Command.VERIFY, version=2)


async def test_without_prompts_the_log_names_the_refusal(caplog) -> None:
    group, _ = await started(1, FakeLauncher(refusing), verify={"canary_prompts": []})
    await offload(group)
    await give(group, push(1))
    assert "verified by version only: its weights checker refuses" in caplog.text
    assert NO_COMPARABLE in caplog.text


async def test_a_drain_that_retracts_aborts_where_only_log_probs_verify() -> None:
    group, (engine,) = await started(
        1, FakeLauncher(refusing), needs_offload=False, lifecycle={"drain": "retract"}
    )
    await group.run(Command.PAUSE_GENERATION)
    assert engine.calls[-1].arguments == {"mode": "abort"}


def test_over_http_a_refusal_leads_to_the_log_prob_check(tmp_path: Path) -> None:
    groups = {"shared": {"num_engines": 2}}
    with launched(launch_local, tmp_path, groups, server={"verify": PROMPTS}) as deployment:
        policy = deployment["policy"]
        with engines_of(policy) as engines:
            for engine in engines.values():
                engine.fail_next("weights_checker", NO_COMPARABLE)
            policy.offload().result()
            report = policy.push(push(1)).result()
        by = {one.verified_by for phase in report.reports for one in phase.engines}
        assert "canary" in by
        states = {one.state for group in policy.status().result().groups for one in group.engines}
        assert states == {"serving"}


@pytest.mark.parametrize("num", [1, 2])
async def test_fingerprints_that_nothing_was_compared_with_verify_nothing(num: int) -> None:
    group, _ = await started(num, FakeLauncher())
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    report = await group.run(Command.VERIFY, version=1)
    assert {one.verified_by for one in report.engines} == {"version" if num == 1 else "fingerprint"}
    await group.run(Command.ONLOAD_KV)
    report = await group.run(Command.CONTINUE_GENERATION)
    assert {one.verified_by for one in report.engines} == {"canary" if num == 1 else ""}


# -- pipeline stages ------------------------------------------------------------------------------


class FirstStage(FakeEngine):
    """Reports fingerprints of its first stage alone, as SGLang does."""

    async def weights_checker(self, action: str = "checksum") -> WeightsReport:
        report = await super().weights_checker(action)
        return replace(report, why_partial="it reports fingerprints of 1 of its 2 pipeline stages")


def of_first_stage(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return FirstStage(spec.engine_id, endpoint=endpoint)


async def test_stages_that_report_no_fingerprints_need_the_log_prob_check() -> None:
    group, _ = await started(2, FakeLauncher(of_first_stage))
    await offload(group)
    report = await give(group, push(1))
    assert [one.verified_by for one in report.engines] == ["canary"] * 2


# -- experts that move --------------------------------------------------------------------------

EXPERT = TensorInfo("model.layers.0.mlp.experts.w13_weight", "float32", (8, 8))
SHARED = TensorInfo("model.norm.weight", "float32", (8,))


class Balanced(FakeEngine):
    """Places its experts by their load: each engine otherwise."""

    async def server_info(self) -> ServerInfo:
        return replace(await super().server_info(), raw={"enable_eplb": True})


def of_experts(version: int) -> WeightPush:
    tensors = {one.name: FakeTensor(one.shape, version) for one in (EXPERT, SHARED)}
    return WeightPush(version, manifest((EXPERT, SHARED)), [pack_tensors(tensors)])


def balanced(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return Balanced(spec.engine_id, endpoint=endpoint, tensors=(EXPERT, SHARED))


async def test_engines_that_place_their_experts_differently_are_not_fenced() -> None:
    group, engines = await started(2, FakeLauncher(balanced), verify={"canary_prompts": []})
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    await group.run(Command.UPDATE_WEIGHTS, push=of_experts(1))
    for engine in engines:
        engine.weights.digests[EXPERT.name] = engine.engine_id
    report = await group.run(Command.VERIFY, version=1)
    assert not report.failures
    await group.run(Command.UPDATE_WEIGHTS, push=of_experts(2))
    engines[0].weights.digests[SHARED.name] = "torn"
    with pytest.raises(PhaseFailed, match=SHARED.name):
        await group.run(Command.VERIFY, version=2)


async def test_experts_that_move_need_the_log_prob_check() -> None:
    group, _ = await started(2, FakeLauncher(balanced))
    await offload(group)
    report = await give(group, of_experts(1))
    assert [one.verified_by for one in report.engines] == ["canary"] * 2
