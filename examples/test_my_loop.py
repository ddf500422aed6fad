"""Unit tests of your own training loop: no GPU, no cluster, no torch, milliseconds.

``stub_ray`` stands in for Ray and ``HttpFakeLauncher`` for SGLang.  Everything between is real:
the actors' classes, the lifecycle, the router and the HTTP in front of the engines.  The fakes die
of what SGLang dies of, so a loop that would kill an engine in production kills one here.

    python -m pytest examples/test_my_loop.py
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rollout
from engines.fake import FakeTensor, pack_tensors, write_checkpoint
from engines.fake.http import HttpFakeLauncher
from engines.fake.weights import DEFAULT_TENSORS
from rollout.testing import stub_ray
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.push import WeightPush


def my_step(policy: rollout.ServerHandle, train: Callable[[], WeightPush]) -> None:
    """The loop under test: what you wrote."""
    policy.offload().result()
    new_weights = train()
    policy.onload_push(new_weights).result()


def weights(version: int) -> WeightPush:
    """What ``make_push`` makes of a state dict, without torch."""
    payload = pack_tensors({one.name: FakeTensor(one.shape, version) for one in DEFAULT_TENSORS})
    manifest = Manifest.of(TensorSpec(one.name, one.dtype, one.shape) for one in DEFAULT_TENSORS)
    return WeightPush(version, manifest, [payload])


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[rollout.ServerHandle]:
    server = {
        "model_path": str(write_checkpoint(tmp_path / "model")),
        "groups": {"main": {"num_engines": 2}},
    }
    config = rollout.RolloutConfig.from_dict(
        {"log_dir": str(tmp_path / "logs"), "servers": {"policy": server}}
    )
    with stub_ray.installed():
        from rollout.actors.launch import launch_ray

        with launch_ray(config, launcher=HttpFakeLauncher()) as deployment:
            yield deployment["policy"]


def test_the_engines_hold_no_memory_while_the_trainer_works(policy: rollout.ServerHandle) -> None:
    seen = []

    def train() -> WeightPush:
        status = policy.status().result()
        seen.extend(engine.released for group in status.groups for engine in group.engines)
        return weights(1)

    my_step(policy, train)
    assert seen == [("cuda_graph", "kv_cache", "weights")] * 2
    assert policy.status().result().weight_version == 1


def test_a_trainer_that_fails_leaves_the_router_shut(policy: rollout.ServerHandle) -> None:
    def train() -> WeightPush:
        raise ValueError("loss is NaN")

    with pytest.raises(ValueError, match="loss is NaN"):
        my_step(policy, train)
    assert policy.status().result().gate == "holding"
    my_step(policy, lambda: weights(1))  # and the next step goes on from there
    assert policy.status().result().gate == "open"


def test_samples_come_back_with_the_version_that_drew_them(policy: rollout.ServerHandle) -> None:
    my_step(policy, lambda: weights(1))
    sampling = rollout.SamplingParams(max_new_tokens=3)
    with rollout.Driver(policy.url) as driver:
        groups = driver.rollout(
            1, [rollout.Prompt((1, 2))], group_size=2, sampling=sampling
        ).result()
    assert [span.version for one in groups[0].samples for span in one.weight_versions] == ["1", "1"]
