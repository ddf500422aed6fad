"""An adapter that all engines refuse is an error, and fences none of them."""

from dataclasses import replace

import pytest

from engines.fake import FakeEngine
from engines.protocol.errors import EngineRejected, NotEncodable
from rollout.config import WeightUpdate
from rollout.control.group.server_group import ServerGroup
from rollout.control.group.weight_update import _outlast
from rollout.core.errors import PhaseFailed, WeightMismatch
from rollout.rules.lifecycle import Command
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.adapter import AsAdapter
from tests.support.builders import started_group

LOAD = "load_lora_adapter_from_tensors"
REFUSED = EngineRejected("rank 32 is over 16", status=400)


def adapter(version: int) -> WeightPush:
    tensors = Manifest.of([TensorSpec("lora:policy:a", "float32", (2, 2))])
    config = {"r": 2, "lora_alpha": 4}
    return WeightPush(
        version, tensors, [b"adapter"], AsAdapter("policy", config), contents=WeightUpdate.LORA
    )


async def paused() -> tuple[ServerGroup, list[FakeEngine]]:
    group, engines = await started_group(2, update="lora")
    await group.run(Command.PAUSE)
    await group.run(Command.FLUSH)
    return group, engines


def refuse_next(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.fail_next(LOAD, REFUSED)


async def test_a_first_adapter_that_all_refuse_changes_nothing() -> None:
    group, engines = await paused()
    refuse_next(engines)
    with pytest.raises(WeightMismatch, match="no engine of group main takes the adapter of weight"):
        await group.run(Command.UPDATE_WEIGHTS, push=adapter(1))
    status = await group.status()
    assert [one.fence_reason for one in status.engines] == ["", ""]
    assert [one.weight_version for one in status.engines] == [0, 0]
    await group.run(Command.CONTINUE)
    assert (await group.status()).phase == "serving"
    await group.stop()


async def test_after_a_refused_adapter_the_one_from_before_is_loaded_again() -> None:
    group, engines = await paused()
    await group.run(Command.UPDATE_WEIGHTS, push=adapter(1))
    refuse_next(engines)
    with pytest.raises(WeightMismatch, match="all keep the one from before"):
        await group.run(Command.UPDATE_WEIGHTS, push=adapter(2))
    assert [await engine.weight_version() for engine in engines] == ["1", "1"]
    assert [engine.operations().count(LOAD) for engine in engines] == [3, 3]
    assert not any(one.fence_reason for one in (await group.status()).engines)
    await group.run(Command.UPDATE_WEIGHTS, push=adapter(3))
    assert [one.weight_version for one in (await group.status()).engines] == [3, 3]
    await group.stop()


async def test_one_engine_that_refuses_what_others_take_is_fenced() -> None:
    group, engines = await paused()
    refuse_next(engines[:1])
    await group.run(Command.UPDATE_WEIGHTS, push=adapter(1))
    first, second = (await group.status()).engines
    assert "failed" in first.fence_reason
    assert (second.fence_reason, second.weight_version) == ("", 1)
    await group.stop()


async def test_if_the_adapter_from_before_is_refused_too_the_engines_are_fenced() -> None:
    group, engines = await paused()
    await group.run(Command.UPDATE_WEIGHTS, push=adapter(1))
    refuse_next(engines)
    refuse_next(engines)
    with pytest.raises(PhaseFailed, match="rank 32 is over 16"):
        await group.run(Command.UPDATE_WEIGHTS, push=adapter(2))
    assert all(one.fence_reason for one in (await group.status()).engines)
    await group.stop()


async def test_what_cannot_be_encoded_fences_no_engine() -> None:
    group, engines = await paused()
    await group.run(Command.UPDATE_WEIGHTS, push=adapter(1))
    for engine in engines:
        engine.fail_next(LOAD, NotEncodable("a set"))
    with pytest.raises(NotEncodable, match="a set"):
        await group.run(Command.UPDATE_WEIGHTS, push=adapter(2))
    assert not any(one.fence_reason for one in (await group.status()).engines)
    await group.run(Command.UPDATE_WEIGHTS, push=adapter(3))
    assert [one.weight_version for one in (await group.status()).engines] == [3, 3]
    await group.stop()


@pytest.mark.parametrize("value", [{"q_proj"}, object(), 1 << 70, "\ud800", {1: 2}])
def test_a_config_that_json_cannot_express_makes_no_push(value: object) -> None:
    with pytest.raises(WeightMismatch, match="must consist of values of JSON"):
        AsAdapter("policy", {"r": 2, "target_modules": value})


def test_a_new_adapter_replaces_all_names_of_the_one_before() -> None:
    old = adapter(1)
    other = Manifest.of([TensorSpec("lora:policy:b", "float32", (2, 2))])
    known = ["lora:policy:a", "lora:other:a", "base"]
    assert _outlast(known, replace(old, manifest=other)) == ["lora:other:a", "base"]
    full = WeightPush(2, Manifest.of([TensorSpec("base", "float32", (2,))]), [b"w"])
    assert _outlast(known, full) == known[:2]
