"""A push to a group: what half of one leaves, what is refused before, and what verify compares."""

from dataclasses import replace

import pytest

from engines.fake import FakeEngine, FakeLauncher, FakeTensor, faults, fingerprint_of
from engines.protocol import Endpoint, WeightsReport
from engines.protocol.spec import EngineSpec
from rollout.config import WeightUpdate
from rollout.control.engine.state import EngineState
from rollout.control.group.server_group import ServerGroup
from rollout.core.errors import LifecycleError, PhaseFailed, WeightMismatch, WeightsUnavailable
from rollout.rules.fingerprint_check import EngineFingerprints, find_mismatches
from rollout.rules.lifecycle import Command
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.stream_reader import PushStreamAddress
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.by_value import ByValue
from rollout.weights.routes.route import EngineRoute
from rollout.weights.routes.shared_memory import ByPath
from tests.support.builders import TENSOR_NAMES, manifest, push, started_group


async def lost() -> bytes:
    raise WeightsUnavailable("the trainer is gone")


async def test_half_a_push_does_not_serve_and_a_whole_one_mends_it() -> None:
    group, engines = await started_group(2)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    half = WeightPush(1, manifest(), [push(1, num_buckets=2).buckets[0], lost()])
    with pytest.raises(WeightsUnavailable):
        await group.run(Command.UPDATE_WEIGHTS, push=half)
    with pytest.raises(LifecycleError):
        await group.run(Command.CONTINUE_GENERATION)
    assert [one.weight_version for one in (await group.status()).engines] == [None, None]
    await group.run(Command.UPDATE_WEIGHTS, push=push(2))
    await group.run(Command.VERIFY, version=2)
    await group.run(Command.ONLOAD_KV)
    await group.run(Command.CONTINUE_GENERATION)
    assert [await engine.weight_version() for engine in engines] == ["2", "2"]
    await group.stop()


async def test_a_push_that_never_began_leaves_the_engines_what_they_were() -> None:
    group, engines = await started_group(2)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    nobody = PushStreamAddress("127.0.0.1", 1, "token", timeout_s=5)
    with pytest.raises(WeightsUnavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
        await group.run(Command.UPDATE_WEIGHTS, push=WeightPush(1, manifest(), stream=nobody))
    assert [one.weight_version for one in (await group.status()).engines] == [0, 0]
    await group.run(Command.CONTINUE_GENERATION)
    assert not any(engine.weights_are_garbage for engine in engines)
    await group.stop()


async def test_what_an_engine_itself_has_not_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = FakeEngine.endpoints

    async def endpoints(self: FakeEngine) -> frozenset[str]:
        return await asked(self) | {"/weights_manifest"}  # as the embedded engine

    monkeypatch.setattr(FakeEngine, "endpoints", endpoints)
    group, engines = await started_group(2)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    wrong = Manifest.of([*manifest().tensors.values(), TensorSpec("extra", "float32", (2,))])
    with pytest.raises(WeightMismatch, match=r"main-0: .* no tensor 'extra'.*nothing was sent"):
        await group.run(Command.UPDATE_WEIGHTS, push=replace(push(1), manifest=wrong))
    assert all("update_weights_from_tensor" not in engine.operations() for engine in engines)
    await group.run(Command.CONTINUE_GENERATION)
    await group.stop()


async def test_an_engine_that_came_after_the_plan_waits_for_the_next_push() -> None:
    group, engines = await started_group(2)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    first, late = [one.engine_id for one in (await group.status()).engines]
    (value,) = push(1).buckets
    routes = {
        first: EngineRoute("by_value", ByValue()),
        "gone": EngineRoute("shared_memory 0", ByPath()),
    }
    planned = replace(push(1), buckets=[{"by_value": value}], routes=routes)
    report = await group.run(Command.UPDATE_WEIGHTS, push=planned)
    assert not report.failures
    states = {one.engine_id: one for one in (await group.status()).engines}
    assert (states[first].weight_version, states[late].state) == (1, "stale")
    assert not states[late].fence_reason
    assert "update_weights_from_tensor" not in engines[1].operations()
    await group.run(Command.VERIFY, version=1)
    await group.run(Command.UPDATE_WEIGHTS, push=push(2))
    assert [one.weight_version for one in (await group.status()).engines] == [2, 2]
    await group.stop()


def report(**tensors: str) -> WeightsReport:
    return WeightsReport("xxh3:all", (tensors,))


def test_an_engine_that_holds_other_than_was_sent_is_found_even_alone() -> None:
    sent = {"a": "xxh3:1", "b": "xxh3:2"}
    right = EngineFingerprints(report(a="xxh3:1", b="xxh3:2"), sent=sent)
    wrong = EngineFingerprints(report(a="xxh3:1", b="xxh3:9"), sent=sent)
    assert find_mismatches({"e-0": right}) == {}
    assert find_mismatches({"e-0": wrong}) == {"e-0": "tensor 'b' is not what the trainer sent"}


def test_what_cannot_be_compared_is_not() -> None:
    sent = {"a": "xxh3:1"}
    assert (
        find_mismatches({"e-0": EngineFingerprints(report(a="cafe"), sent=sent)}) == {}
    )  # SGLang's own way
    assert (
        find_mismatches({"e-0": EngineFingerprints(report(b="xxh3:9"), sent=sent)}) == {}
    )  # fused elsewhere
    # Where ranks have shards, the engine lists no whole tensors, and none counts as sent.
    sharded = WeightsReport("xxh3:all", ({"a": "xxh3:8"}, {"a": "xxh3:9"}))
    assert find_mismatches({"e-0": EngineFingerprints(sharded)}) == {}


def told_by_the_trainer(of: WeightPush) -> WeightPush:
    """The same push, with the trainer's fingerprints of what is in it."""
    found = {
        name: fingerprint_of(FakeTensor(one.shape, of.version))
        for name, one in of.manifest.tensors.items()
    }
    return replace(of, manifest=Manifest(of.manifest.tensors, found))


def listing_engine(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return FakeEngine(spec.engine_id, endpoint=endpoint, reports_manifest=True)


async def taking(num: int, *pushes: WeightPush, garbled: bool = True) -> ServerGroup:
    """Engines that list their tensors and were given these, the last of them garbled."""
    group, engines = await started_group(num, launcher=FakeLauncher(listing_engine))
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    for one in pushes[:-1]:
        await group.run(Command.UPDATE_WEIGHTS, push=one)
    for engine in engines if garbled else ():
        engine.faults.strike("update_weights_from_tensor", faults.garble())
    await group.run(Command.UPDATE_WEIGHTS, push=pushes[-1])
    return group


async def test_what_all_engines_took_wrongly_alike_is_named_by_the_trainers_fingerprints() -> None:
    group = await taking(2, told_by_the_trainer(push(1)))
    first = min(TENSOR_NAMES)
    with pytest.raises(PhaseFailed, match=f"tensor '{first}' is not what the trainer sent"):
        await group.run(Command.VERIFY, version=1)
    assert [one.state for one in (await group.status()).engines] == ["fenced", "fenced"]


async def test_without_the_trainers_fingerprints_they_would_vouch_for_one_another() -> None:
    group = await taking(2, push(1))
    assert not (await group.run(Command.VERIFY, version=1)).failures
    await group.stop()


async def test_what_was_taken_rightly_is_proved() -> None:
    group = await taking(2, told_by_the_trainer(push(1)), garbled=False)
    assert not (await group.run(Command.VERIFY, version=1)).failures
    assert not any(one.needs_logprob_check for one in group._engines.members())
    await group.stop()


async def test_a_tensor_of_an_earlier_push_is_held_against_the_trainers_of_then() -> None:
    later = told_by_the_trainer(push(2, TENSOR_NAMES[1:2]))
    assert min(TENSOR_NAMES) not in later.manifest.tensors
    group, engines = await started_group(
        2, update="partial", needs_offload=False, launcher=FakeLauncher(listing_engine)
    )
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    await group.run(
        Command.UPDATE_WEIGHTS,
        push=replace(told_by_the_trainer(push(1)), contents=WeightUpdate.FULL),
    )
    for engine in engines:
        engine.faults.strike("update_weights_from_tensor", faults.garble())
    await group.run(Command.UPDATE_WEIGHTS, push=later)
    with pytest.raises(PhaseFailed, match="is not what the trainer sent"):
        await group.run(Command.VERIFY, version=2)


async def test_what_an_engine_converted_to_its_own_dtype_is_left_to_the_others() -> None:
    sent = told_by_the_trainer(push(1))
    specs = {name: replace(one, dtype="bfloat16") for name, one in sent.manifest.tensors.items()}
    other = {name: f"{text}-of-bfloat16" for name, text in sent.manifest.fingerprints.items()}
    group = await taking(2, replace(sent, manifest=Manifest(specs, other)), garbled=False)
    assert not (await group.run(Command.VERIFY, version=1)).failures
    await group.stop()


async def test_a_push_compares_no_engine_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its CPU would grow with the square of their number."""

    def compare(self: EngineState, other: object) -> bool:
        raise AssertionError(f"{self.engine_id} is compared")

    group, engines = await started_group(3)
    monkeypatch.setattr(EngineState, "__eq__", compare)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    await group.run(Command.VERIFY, version=1)
    await group.run(Command.ONLOAD_KV)
    await group.run(Command.CONTINUE_GENERATION)
    assert [await engine.weight_version() for engine in engines] == ["1"] * 3
    await group.stop()
