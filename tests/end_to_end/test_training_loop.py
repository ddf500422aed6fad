"""The library imported into a training loop, over embedded engines of this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout import LifecycleError, RolloutConfig, ServerHandle, launch
from rollout.runtime.handle import DeploymentHandle
from tests.support.processes import ROOT, wait_until

pytestmark = pytest.mark.embedded
OFFLOAD = ["pause_generation", "flush_cache", "release_memory_occupation"]
ONLOAD = ["onload_weights", "update_weights", "verify", "onload_kv", "continue_generation"]


class TrainerFailed(Exception):
    pass


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        import training_loop

        yield training_loop


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout.testing.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def model(model_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path, dtype="float32")


def config(example: Any, model_path: Path, log_dir: Path) -> RolloutConfig:
    return example.config(model_path).model_copy(update={"log_dir": str(log_dir)})


@pytest.fixture(scope="module")
def deployment(
    example: Any, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle]:
    with launch(config(example, model_path, tmp_path_factory.mktemp("logs"))) as handle:
        yield handle


@pytest.fixture
def policy(deployment: DeploymentHandle) -> ServerHandle:
    return deployment["policy"]


def engine_pids(policy: ServerHandle) -> list[int]:
    return [engine.pid for group in policy.status().result().groups for engine in group.engines]


def where(policy: ServerHandle) -> tuple[str, str]:
    status = policy.status().result()
    return status.phase, status.gate


def test_a_window_offloads_trains_pushes_and_serves_again(policy: ServerHandle, model: Any) -> None:
    before = policy.status().result().weight_version
    with policy.offloaded() as window:
        assert where(policy) == ("offloaded", "holding")
        window.push(model.state_dict())
    assert list(window.report.phase_s) == OFFLOAD + ONLOAD
    assert window.report.freed_bytes > 0
    assert where(policy) == ("serving", "open")
    assert policy.status().result().weight_version == before + 1


async def test_an_async_window_does_the_same(policy: ServerHandle, model: Any) -> None:
    async with policy.offloaded(model.state_dict) as window:
        assert (await policy.status()).phase == "offloaded"
    assert list(window.report.phase_s) == OFFLOAD + ONLOAD
    assert (await policy.status()).gate == "open"


def verbs(policy: ServerHandle, model: Any) -> list[Any]:
    return [
        policy.phases.pause_generation,
        policy.phases.flush_cache,
        policy.phases.release_memory_occupation,
        policy.phases.onload_weights,
        lambda: policy.phases.update_weights(model.state_dict()),
        policy.phases.verify,
        policy.phases.onload_kv,
        policy.phases.continue_generation,
    ]


def test_the_verbs_in_their_order_make_a_step(policy: ServerHandle, model: Any) -> None:
    done = [list(verb().result().phase_s) for verb in verbs(policy, model)]
    assert done == [[phase] for phase in OFFLOAD + ONLOAD]
    assert where(policy) == ("serving", "open")


async def test_the_verbs_may_be_awaited(policy: ServerHandle, model: Any) -> None:
    done = [list((await verb()).phase_s) for verb in verbs(policy, model)]
    assert done == [[phase] for phase in OFFLOAD + ONLOAD]


def test_a_verb_out_of_order_is_refused_and_the_loop_can_go_on(
    policy: ServerHandle, model: Any
) -> None:
    policy.phases.pause_generation().result()
    with pytest.raises(
        LifecycleError,
        match="cannot release_memory_occupation while paused; legal now: flush_cache",
    ):
        policy.phases.release_memory_occupation().result()
    policy.phases.continue_generation().result()
    assert where(policy) == ("serving", "open")


def test_an_error_in_the_block_leaves_the_gate_shut_and_the_engines_offloaded(
    policy: ServerHandle, model: Any
) -> None:
    def train() -> None:
        with policy.offloaded() as window:
            window.push(model.state_dict())
            raise TrainerFailed

    with pytest.raises(TrainerFailed):
        train()
    assert where(policy) == ("offloaded", "holding")
    policy.push(model.state_dict()).result()
    assert where(policy) == ("serving", "open")


async def test_so_does_an_error_in_an_async_block(policy: ServerHandle, model: Any) -> None:
    with pytest.raises(TrainerFailed):
        async with policy.offloaded():
            raise TrainerFailed
    assert where(policy) == ("offloaded", "holding")
    await policy.push(model.state_dict())
    assert where(policy) == ("serving", "open")


# 5: weights that are pushed and not verified.
@pytest.mark.parametrize(
    "num_steps", [5, *(pytest.param(one, marks=pytest.mark.slow) for one in (0, 1, 2, 3, 4, 6, 7))]
)
def test_both_calls_from_every_phase(policy: ServerHandle, model: Any, num_steps: int) -> None:
    steps = (
        policy.phases.pause_generation,
        policy.phases.flush_cache,
        policy.phases.release_memory_occupation,
        policy.phases.onload_weights,
        lambda: policy.phases.update_weights(model.state_dict()),
        policy.phases.verify,
        policy.phases.onload_kv,
    )
    for step in steps[:num_steps]:
        step().result()
    policy.push(model.state_dict()).result()
    assert where(policy) == ("serving", "open")
    for step in steps[:num_steps]:
        step().result()
    is_released = where(policy)[0] == "offloaded"
    assert (policy.offload().result().freed_bytes > 0) is not is_released
    assert where(policy) == ("offloaded", "holding")
    version = policy.weight_version + 1
    assert policy.push(model.state_dict(), version).result().weight_version == version
    assert where(policy) == ("serving", "open")


@pytest.mark.slow
def test_after_an_error_in_the_block_stop_leaves_nothing(
    example: Any, model_path: Path, tmp_path: Path
) -> None:
    pids: list[int] = []

    def train() -> None:
        with (
            launch(config(example, model_path, tmp_path)) as deployment,
            deployment["policy"].offloaded(),
        ):
            pids.extend(engine_pids(deployment["policy"]))
            raise TrainerFailed

    with pytest.raises(TrainerFailed):
        train()
    assert len(pids) == 1
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids)), 5)
