"""embedded and recovery: one engine on the GPU goes through a step, and comes back when killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.protocol import MemoryTag, PauseMode
from rollout.core.errors import LifecycleError
from tests.support.engine_keys import client_of
from tests.support.gpu.figures import record
from tests.support.gpu.machine import Gpu, holder, need, timed, with_engines
from tests.support.gpu.policy import TIMEOUT_S, OneEngine, one_engine
from tests.support.processes import wait_until

pytestmark = [pytest.mark.embedded, with_engines]
TAKEN_GIB = 100
BACK_WITHIN_S = 120.0


@pytest.fixture(scope="module")
def started(gpu: Gpu, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneEngine]:
    need("torch_memory_saver", gpu)
    folder = tmp_path_factory.mktemp("policy")
    with one_engine(gpu, model, folder / "logs") as policy:
        yield policy


@pytest.fixture
def policy(started: OneEngine) -> Iterator[OneEngine]:
    """It serves, before and after."""
    assert started.state == "serving"
    yield started
    if started.state == "offloaded":  # the test failed in the middle
        started.handle.push(started.tensors).result(TIMEOUT_S)
    assert wait_until(lambda: started.state == "serving", BACK_WITHIN_S)


def test_a_step_lends_the_memory_to_another_process_and_takes_it_back(policy: OneEngine) -> None:
    gpu, handle = policy.gpu, policy.handle
    tokens = policy.tokens()
    offload_s = timed(lambda: handle.offload().result(TIMEOUT_S))
    assert policy.state == "offloaded"
    free = gpu.free_bytes()
    taken = min(TAKEN_GIB * gpu.gib, int(free * 0.9))
    with holder(gpu, taken):
        assert free - gpu.free_bytes() >= taken
    gpu.settle()
    onload_s = timed(lambda: handle.push(policy.tensors).result(TIMEOUT_S))
    assert policy.tokens() == tokens
    record(f"embedded step {gpu.device}", offload_s=offload_s, onload_s=onload_s, taken=taken)


def test_an_offload_frees_most_of_weights_and_kv_cache(policy: OneEngine) -> None:
    held = policy.memory_by_tag()
    before = policy.gpu.settle()
    report = policy.handle.offload().result(TIMEOUT_S)
    after = policy.gpu.settle()
    assert before - after >= 0.8 * sum(held.values())
    assert report.freed_bytes >= 0.8 * sum(held.values())
    policy.handle.push(policy.tensors).result(TIMEOUT_S)
    assert policy.gpu.settle() >= before - policy.gpu.gib / 10
    record(f"embedded offload {policy.gpu.device}", freed_bytes=before - after, by_tag=held)


async def test_weights_are_poisoned_when_the_push_is_skipped(policy: OneEngine) -> None:
    before = policy.fingerprints()
    engine = client_of(policy.engine, engine_id="main-0")
    await engine.pause_generation(PauseMode.ABORT)
    await engine.flush_cache(timeout_s=10.0)
    await engine.release_memory_occupation([MemoryTag.WEIGHTS])
    await engine.resume_memory_occupation([MemoryTag.WEIGHTS])
    poisoned = policy.fingerprints()
    assert not [name for name in before if poisoned[name] == before[name]]
    await engine.continue_generation()
    await engine.aclose()
    policy.handle.push(policy.tensors).result(TIMEOUT_S)
    assert policy.fingerprints() == before


def test_without_room_the_onload_is_refused_in_words(policy: OneEngine) -> None:
    gpu, handle = policy.gpu, policy.handle
    pid = policy.engine.pid
    handle.offload().result(TIMEOUT_S)
    weights = policy.tensors.values()
    room = sum(tensor.nbytes for tensor in weights) // 2
    with holder(gpu, gpu.free_bytes() - room - int(0.6 * gpu.gib)):
        with pytest.raises(LifecycleError, match=f"GPU {gpu.uuid} has .* free, weights need"):
            handle.push(policy.tensors).result(TIMEOUT_S)
        assert policy.engine.pid == pid
    gpu.settle()
    handle.push(policy.tensors).result(TIMEOUT_S)


def test_an_engine_killed_while_serving_comes_back_verified(policy: OneEngine) -> None:
    handle, tokens = policy.handle, policy.tokens()
    handle.push(policy.tensors).result(TIMEOUT_S)
    before = policy.gpu.settle()
    pid = policy.kill()

    def wait() -> None:
        assert wait_until(
            lambda: policy.engine.pid not in (None, pid) and not policy.engine.fence_reason,
            BACK_WITHIN_S,
        )

    seconds = timed(wait)
    handle.push(policy.tensors).result(TIMEOUT_S)
    assert policy.tokens() == tokens
    assert abs(policy.gpu.settle() - before) < policy.gpu.gib
    assert policy.engine.weight_version == handle.weight_version
    record(f"recovery while serving {policy.gpu.device}", restart_s=seconds)


def test_an_engine_killed_while_offloaded_stays_away_until_the_onload(policy: OneEngine) -> None:
    handle, gpu, tokens = policy.handle, policy.gpu, policy.tokens()
    handle.offload().result(TIMEOUT_S)
    policy.kill()
    assert wait_until(lambda: bool(policy.engine.fence_reason), 30)
    free = gpu.settle()
    with holder(gpu, gpu.free_bytes() // 2):
        assert policy.engine.fence_reason
    assert gpu.settle() <= free + gpu.gib / 10

    def come_back() -> None:
        handle.push(policy.tensors).result(TIMEOUT_S)
        assert wait_until(lambda: not policy.engine.fence_reason, BACK_WITHIN_S)

    seconds = timed(come_back)
    handle.push(policy.tensors).result(TIMEOUT_S)
    assert policy.tokens() == tokens
    record(f"recovery while offloaded {gpu.device}", back_s=seconds)
