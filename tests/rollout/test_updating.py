"""A push to a group: what half of one leaves, what is refused before, and what verify compares."""

from dataclasses import replace

import pytest

from engines.fake import FakeEngine
from engines.protocol import WeightsReport
from rollout.errors import LifecycleError, WeightMismatch, WeightsUnavailable
from rollout.verification import Evidence, judge
from rollout.weights.feed import FeedAddress
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.push import WeightPush
from tests.support.builders import manifest, push, started_group


async def lost() -> bytes:
    raise WeightsUnavailable("the trainer is gone")


async def test_half_a_push_does_not_serve_and_a_whole_one_mends_it() -> None:
    group, engines = await started_group(2)
    await group.pause()
    await group.flush()
    half = WeightPush(1, manifest(), [push(1, num_buckets=2).buckets[0], lost()])
    with pytest.raises(WeightsUnavailable):
        await group.update_weights(half)
    with pytest.raises(LifecycleError):
        await group.continue_generation()
    assert [one.weight_version for one in (await group.status()).engines] == [None, None]
    await group.update_weights(push(2))
    await group.verify(2)
    await group.resume_kv()
    await group.continue_generation()
    assert [await engine.weight_version() for engine in engines] == ["2", "2"]
    await group.stop()


async def test_a_push_that_never_began_leaves_the_engines_what_they_were() -> None:
    group, engines = await started_group(2)
    await group.pause()
    await group.flush()
    nobody = FeedAddress("127.0.0.1", 1, "token", timeout_s=5)
    with pytest.raises(WeightsUnavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
        await group.update_weights(WeightPush(1, manifest(), feed=nobody))
    assert [one.weight_version for one in (await group.status()).engines] == [0, 0]
    await group.continue_generation()
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
    await group.pause()
    await group.flush()
    wrong = Manifest.of([*manifest().tensors.values(), TensorSpec("extra", "float32", (2,))])
    with pytest.raises(WeightMismatch, match=r"main-0: .* no tensor 'extra'.*nothing was sent"):
        await group.update_weights(replace(push(1), manifest=wrong))
    assert all("update_weights_from_tensor" not in engine.operations() for engine in engines)
    await group.continue_generation()
    await group.stop()


def report(**tensors: str) -> WeightsReport:
    return WeightsReport("xxh3:all", (tensors,))


def test_an_engine_that_holds_other_than_was_sent_is_found_even_alone() -> None:
    sent = {"a": "xxh3:1", "b": "xxh3:2"}
    right = Evidence(report(a="xxh3:1", b="xxh3:2"), sent=sent)
    wrong = Evidence(report(a="xxh3:1", b="xxh3:9"), sent=sent)
    assert judge({"e-0": right}) == {}
    assert judge({"e-0": wrong}) == {"e-0": "tensor 'b' is not what the trainer sent"}


def test_what_cannot_be_compared_is_not() -> None:
    sent = {"a": "xxh3:1"}
    assert judge({"e-0": Evidence(report(a="cafe"), sent=sent)}) == {}  # SGLang's own way
    assert judge({"e-0": Evidence(report(b="xxh3:9"), sent=sent)}) == {}  # fused elsewhere
    sharded = WeightsReport("xxh3:all", ({"a": "xxh3:8"}, {"a": "xxh3:9"}))
    assert judge({"e-0": Evidence(sharded, sent=sent)}) == {}
