"""A version of an adapter is on all engines that serve and verified, or on none of them."""

import pytest

from engines.fake import FakeEngine
from engines.protocol.errors import EngineRejected, EngineUnreachable, NotEncodable
from rollout.control.group.server_group import ServerGroup
from rollout.core.errors import PhaseFailed, WeightMismatch
from rollout.weights.routes.adapter import AsAdapter
from tests.support.builders import adapter_push, restart, started_group

LOAD, UNLOAD = "load_lora_adapter_from_tensors", "unload_lora_adapter"
REFUSED = EngineRejected("rank 32 is over 16", status=400)
BY_CANARY = {"canary_prompts": [[1, 2, 3], [4, 5]], "sentinel": False}


async def serving(**lifecycle: object) -> tuple[ServerGroup, list[FakeEngine]]:
    return await started_group(3, update="lora", verify=BY_CANARY, lifecycle=lifecycle)


def names(engines: list[FakeEngine]) -> list[set[str]]:
    return [set(engine.adapters) for engine in engines]


async def fence_reasons(group: ServerGroup) -> set[str]:
    return {one.fence_reason for one in (await group.status()).engines}


async def test_versions_are_beside_each_other_and_nothing_is_paused() -> None:
    group, engines = await serving()
    for push in (adapter_push(1), adapter_push(2, content=b"new"), adapter_push(3, "judge")):
        report = await group.stage_adapter(push)
        assert {one.verified_by for one in report.engines} == {"canary"}
    assert names(engines) == [{"policy@1", "policy@2", "judge@3"}] * 3
    operations = {name for engine in engines for name in engine.operations()}
    assert not operations & {"pause_generation", "flush_cache", "update_weight_version"}
    assert await group.unload_adapters(["policy@1"])
    assert names(engines) == [{"policy@2", "judge@3"}] * 3
    await group.stop()


async def test_what_all_engines_refuse_is_the_pushs_fault() -> None:
    group, engines = await serving()
    await group.stage_adapter(adapter_push(1))
    for engine in engines:
        engine.fail_next(LOAD, REFUSED)
    with pytest.raises(WeightMismatch, match="no engine of group main takes adapter policy@2"):
        await group.stage_adapter(adapter_push(2))
    assert names(engines) == [{"policy@1"}] * 3
    assert await fence_reasons(group) == {""}
    await group.stop()


@pytest.mark.parametrize("operation", [UNLOAD, LOAD, "generate"])
async def test_an_engine_that_fails_at_any_step_leaves_the_new_version_nowhere(
    operation: str,
) -> None:
    group, engines = await serving()
    await group.stage_adapter(adapter_push(1))
    engines[1].fail_next(operation, EngineUnreachable("died"))
    with pytest.raises(PhaseFailed, match="policy@2 serves nowhere, and what served before"):
        await group.stage_adapter(adapter_push(2))
    assert names(engines) == [{"policy@1"}] * 3
    await group.stage_adapter(adapter_push(2))  # and the push can be repeated
    assert names(engines) == [{"policy@1", "policy@2"}] * 3
    await group.stop()


async def test_an_engine_that_has_loaded_something_else_fails_the_proof() -> None:
    group, engines = await serving()
    engines[2].weights.garble()  # so that it answers as with another adapter
    with pytest.raises(PhaseFailed, match="under adapter 'policy@1' has log-probability"):
        await group.stage_adapter(adapter_push(1))
    assert names(engines) == [set()] * 3
    assert await fence_reasons(group) == {""}
    await group.stop()


async def test_an_adapter_that_answers_otherwise_than_the_trainers_model_fails_the_proof() -> None:
    group, engines = await serving()
    wrong = tuple((-50.0,) * (len(prompt) - 1) for prompt in BY_CANARY["canary_prompts"])
    with pytest.raises(PhaseFailed, match="by the trainer's own model"):
        await group.stage_adapter(adapter_push(1, canary=wrong))
    assert names(engines) == [set()] * 3
    await group.stop()


@pytest.mark.parametrize("is_new_group", [False, True])
async def test_a_restarted_engine_gets_all_versions_before_it_serves(is_new_group: bool) -> None:
    group, _ = await serving()
    pushes = [adapter_push(1), adapter_push(2, content=b"new"), adapter_push(3, "judge")]
    if is_new_group:  # in the place of a lost one
        await group.know_adapters(pushes)
    else:
        for push in pushes:
            await group.stage_adapter(push)
    await group.unload_adapters(["policy@1"])
    await group.fence("main-1", "it died")
    await restart(group, "main-1")
    assert await group.readmit("main-1", 0)
    restarted = group._engines["main-1"].engine
    assert isinstance(restarted, FakeEngine)
    assert set(restarted.adapters) == {"policy@2", "judge@3"}
    await group.stop()


async def test_what_cannot_be_encoded_is_no_engines_fault() -> None:
    group, engines = await serving()
    for engine in engines:
        engine.fail_next(LOAD, NotEncodable("a set"))
    with pytest.raises(NotEncodable, match="a set"):
        await group.stage_adapter(adapter_push(2))
    assert await fence_reasons(group) == {""}
    await group.stop()


@pytest.mark.parametrize("value", [{"q_proj"}, object(), 1 << 70, "\ud800", {1: 2}])
def test_a_config_that_json_cannot_express_makes_no_push(value: object) -> None:
    with pytest.raises(WeightMismatch, match="must consist of values of JSON"):
        AsAdapter("policy", {"r": 2, "target_modules": value})
