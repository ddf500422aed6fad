"""Engines without fingerprints pass a log-prob check before the gate opens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeTensor, faults
from engines.fake.engine.fake_caches import FakeCaches
from engines.fake.engine.fake_weights import DEFAULT_TENSORS, FakeWeights
from engines.protocol import PauseMode
from rollout.config import VerifyConfig
from rollout.control.group.server_group import ServerGroup
from rollout.core.errors import PhaseFailed, WeightMismatch
from rollout.rules.lifecycle import Command
from rollout.rules.probe import Logprobs
from tests.support.builders import (
    TENSOR_NAMES,
    adapter_push,
    push,
    restart,
    started_group,
    started_server,
)
from tests.support.virtual_time import pass_time, virtual_time

PROMPTS: list[list[int]] = [[1, 2, 3], [4, 5]]
BY_CANARY = {"by": "canary", "canary_prompts": PROMPTS, "sentinel": False}
NAME = TENSOR_NAMES[1]


async def frozen_group(num: int, **lifecycle: Any) -> tuple[ServerGroup, list[FakeEngine]]:
    """Engines that release their weights, and get them back from a backup."""
    return await started_group(num, update="frozen", verify=BY_CANARY, lifecycle=lifecycle)


async def offload(group: ServerGroup) -> None:
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    await group.run(Command.RELEASE_MEMORY_OCCUPATION)


async def up_to_continue(group: ServerGroup, version: int) -> None:
    await group.run(Command.VERIFY, version=version)
    await group.run(Command.ONLOAD_KV)


async def give(group: ServerGroup, version: int) -> None:
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    await group.run(Command.UPDATE_WEIGHTS, push=push(version))
    await up_to_continue(group, version)


def scribble(engine: FakeEngine, name: str = NAME) -> None:
    """One tensor is wrong, and nothing says so."""
    tensor = engine.weights.tensors[name]
    engine.weights.write([(name, FakeTensor(tensor.shape, -1.0))])


async def states(group: ServerGroup) -> dict[str, str]:
    return {one.engine_id: one.state for one in (await group.status()).engines}


async def test_weights_that_come_back_as_garbage_are_found_without_any_fingerprint() -> None:
    group, engines = await frozen_group(2)
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    for engine in engines:  # both: there is no majority
        engine.weights.lose()
    await up_to_continue(group, 0)
    with pytest.raises(PhaseFailed, match=r"canary prompt \d, token \d has log-prob") as failed:
        await group.run(Command.CONTINUE_GENERATION)
    assert failed.value.phase == "continue_generation"
    assert "when the weights were the same" in str(failed.value)
    assert set((await states(group)).values()) == {"fenced"}
    assert all(engine.is_dead for engine in engines)
    assert all("weights_checker" not in engine.operations() for engine in engines)


async def test_weights_that_come_back_whole_serve() -> None:
    group, engines = await frozen_group(1)
    for _ in range(2):
        await offload(group)
        await group.run(Command.ONLOAD_WEIGHTS)
        await up_to_continue(group, 0)
        await group.run(Command.CONTINUE_GENERATION)
    assert set((await states(group)).values()) == {"serving"}
    (engine,) = engines
    # Only when it generates again, for a paused SGLang never answers.
    assert engine.operations()[-3:] == ["continue_generation", "generate", "generate"]
    assert engine.calls[-1].arguments["rid"].startswith("probe-")


async def test_the_one_that_took_a_push_wrongly_is_outvoted_and_fenced() -> None:
    group, engines = await started_group(3, verify=BY_CANARY)
    await give(group, 1)
    scribble(engines[1])
    report = await group.run(Command.CONTINUE_GENERATION)
    assert [one.engine_id for one in report.failures] == ["main-1"]
    assert "on engine main-0 and 1 more" in report.failures[0].failure
    assert await states(group) == {"main-0": "serving", "main-1": "fenced", "main-2": "serving"}


async def test_a_canary_is_not_asked_where_nothing_has_changed() -> None:
    group, (engine,) = await started_group(1, verify=BY_CANARY)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.CONTINUE_GENERATION)
    assert "generate" not in engine.operations()


async def test_an_engine_that_does_not_answer_it_is_fenced() -> None:
    group, engines = await started_group(2, verify=BY_CANARY)
    await give(group, 1)
    engines[0].die("it died")
    report = await group.run(Command.CONTINUE_GENERATION)
    assert [one.engine_id for one in report.failures] == ["main-0"]


async def test_an_engine_that_refuses_it_says_what_can_be_set() -> None:
    group, (engine,) = await started_group(1, verify=BY_CANARY)
    await give(group, 1)
    engine.faults.strike("generate", faults.reject(400, "no log-probabilities here"))
    with pytest.raises(PhaseFailed, match=r"no log-probabilities here; .*verify.by to version"):
        await group.run(Command.CONTINUE_GENERATION)


async def test_without_fingerprints_nothing_is_retracted_that_would_run_unproved() -> None:
    for verify, mode in ((BY_CANARY, PauseMode.ABORT), ({}, PauseMode.RETRACT)):
        group, (engine,) = await started_group(1, verify=verify, lifecycle={"drain": "retract"})
        await group.run(Command.PAUSE_GENERATION)
        assert engine.calls[-1].arguments == {"mode": mode}


async def test_one_engine_whose_push_nobody_can_vouch_for_tells_that_it_makes_numbers() -> None:
    prompts = {"canary_prompts": PROMPTS, "sentinel": False}
    group, (engine,) = await started_group(1, verify=prompts)
    await give(group, 1)
    await group.run(Command.CONTINUE_GENERATION)
    assert engine.operations().count("weights_checker") == 1
    assert engine.operations()[-2:] == ["generate", "generate"]
    two, engines = await started_group(2, verify=prompts)
    await give(two, 1)
    await two.run(Command.CONTINUE_GENERATION)  # they agree
    assert all("generate" not in one.operations() for one in engines)


async def test_a_server_opens_its_gate_only_after_the_canary(tmp_path: Path) -> None:
    groups = {"shared": {"num_engines": 1}}
    bench = await started_server(tmp_path, groups, verify=BY_CANARY)
    await bench.server.offload()
    gate = bench.engines[0].hold("generate")
    onload = asyncio.create_task(bench.server.push(push(1)))
    await gate.entered.wait()
    assert bench.engines[0].paused is None
    assert bench.router.gate == "holding"
    gate.open()
    await onload
    assert bench.router.gate == "open"
    await bench.server.stop()


async def test_an_engine_that_comes_back_is_held_against_one_that_serves() -> None:
    group, _ = await frozen_group(2)
    await group.fence("main-1", "for the test")
    await restart(group, "main-1")
    assert await group.readmit("main-1", 0)
    assert (await states(group))["main-1"] == "serving"


async def test_an_engine_that_comes_back_with_other_weights_does_not_serve() -> None:
    group, _ = await frozen_group(2)
    await group.fence("main-1", "for the test")
    await restart(group, "main-1")
    member = group._engines["main-1"]
    scribble(member.engine)  # type: ignore[arg-type]
    member.canary = {}  # it has reported nothing before
    with pytest.raises(WeightMismatch, match="on engine main-0, whose weights are verified"):
        await group.readmit("main-1", 0)
    assert (await states(group))["main-1"] == "stale"


def test_a_canary_of_one_token_tells_nothing_and_is_refused() -> None:
    with pytest.raises(ValueError, match="canary_prompts"):
        VerifyConfig.model_validate({"canary_prompts": [[1]]})


async def test_after_a_release_an_adapter_is_compared_by_prompts_under_it() -> None:
    prompts, retract = {"canary_prompts": PROMPTS, "sentinel": False}, {"drain": "retract"}
    group, engines = await started_group(2, update="lora", verify=prompts, lifecycle=retract)
    await group.stage_adapter(adapter_push(1))
    # A release keeps it, and only a log-prob check shows that: so nothing is retracted.
    await offload(group)
    assert engines[0].calls[-3].arguments == {"mode": PauseMode.ABORT}
    await group.run(Command.ONLOAD_WEIGHTS)
    engines[1].adapters["policy@1"] = "lost"
    await up_to_continue(group, 0)
    report = await group.run(Command.CONTINUE_GENERATION)
    assert [one.engine_id for one in report.failures] == ["main-1"]
    assert "under adapter 'policy@1' has log-probability" in report.failures[0].failure
    assert "when the weights were the same" in report.failures[0].failure


def told_by_a_trainer(version: int) -> Logprobs:
    """The log-probs of an engine that has the right weights."""
    weights = FakeWeights(DEFAULT_TENSORS)
    weights.write((one.name, FakeTensor(one.shape, version)) for one in DEFAULT_TENSORS)
    return tuple(FakeCaches().logprobs(weights, prompt, 0)[0] for prompt in PROMPTS)


async def test_what_all_took_wrongly_alike_is_found_by_what_the_trainers_model_tells() -> None:
    prompts = {"canary_prompts": PROMPTS, "sentinel": False}
    for is_garbled in (False, True):
        group, engines = await started_group(2, verify=prompts)
        await offload(group)
        await group.run(Command.ONLOAD_WEIGHTS)
        for engine in engines if is_garbled else ():
            engine.faults.strike("update_weights_from_tensor", faults.garble())
        await group.run(Command.UPDATE_WEIGHTS, push=replace(push(1), canary=told_by_a_trainer(1)))
        await up_to_continue(group, 1)
        if not is_garbled:
            assert not (await group.run(Command.CONTINUE_GENERATION)).failures
            continue
        with pytest.raises(PhaseFailed, match="by the trainer's own model"):
            await group.run(Command.CONTINUE_GENERATION)
        assert set((await states(group)).values()) == {"fenced"}


async def test_expectations_of_other_prompts_are_refused_before_anything_is_sent() -> None:
    group, engines = await started_group(1, verify=BY_CANARY)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    with pytest.raises(WeightMismatch, match=r"of \[1\] tokens; the canary prompts have \[2, 1\]"):
        await group.run(Command.UPDATE_WEIGHTS, push=replace(push(1), canary=((-1.0,),)))
    assert "update_weights_from_tensor" not in engines[0].operations()


# -- what has failed is not given again -----------------------------------------------------------


@virtual_time
async def test_a_checkpoint_of_weights_that_failed_is_not_loaded(tmp_path: Path) -> None:
    saved = tmp_path / "saved" / "1"
    saved.mkdir(parents=True)
    (saved / "config.json").write_text("{}")
    bench = await started_server(
        tmp_path,
        {"main": {"num_engines": 1, "needs_offload": False}},
        verify=BY_CANARY,
        health={"weights_path": str(tmp_path / "saved" / "{version}"), "probe_interval_s": 1.0},
    )
    wrong = tuple((-50.0,) * (len(prompt) - 1) for prompt in PROMPTS)
    with pytest.raises(PhaseFailed, match="by the trainer's own model"):
        await bench.server.push(replace(push(1), canary=wrong))
    await pass_time(60)
    (engine,) = bench.engines
    assert "update_weights_from_disk" not in engine.operations()
    assert not (await bench.server.status()).groups[0].engines[0].fence_reason
    await bench.server.push(push(2))
    assert bench.router.gates[-1] == {"state": "open", "weight_version": 2}
    await bench.server.stop()
