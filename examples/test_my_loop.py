"""Unit tests of your training loop: no GPU, no cluster, no torch, milliseconds.

``stub_ray`` replaces Ray and ``launch_fakes`` replaces SGLang.  Everything between is real: the
classes of the actors, the lifecycle, the router and HTTP to the engines.  Calls that crash SGLang
crash the fakes too, so a loop that would kill an engine in production fails here.

    python -m pytest examples/test_my_loop.py
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rollout
from rollout.testing import fake_checkpoint, fake_push, launch_fakes, stub_ray


def my_step(policy: rollout.ServerHandle, train: Callable[[], rollout.Push]) -> None:
    """The loop under test: your code."""
    policy.offload().result()
    new_weights = train()
    policy.push(new_weights).result()


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[rollout.ServerHandle]:
    server = {
        "model_path": str(fake_checkpoint(tmp_path / "model")),
        "groups": {"main": {"num_engines": 2, "engine": {"kind": "fake"}}},
    }
    config = rollout.RolloutConfig.from_dict(
        {"log_dir": str(tmp_path / "logs"), "servers": {"policy": server}}
    )
    with stub_ray.installed(), launch_fakes(config, backend="ray") as deployment:
        yield deployment["policy"]


def test_the_engines_hold_no_memory_while_the_trainer_works(policy: rollout.ServerHandle) -> None:
    released = []

    def train() -> rollout.Push:
        status = policy.status().result()
        released.extend(engine.released for group in status.groups for engine in group.engines)
        return fake_push(1)

    my_step(policy, train)
    assert released == [("cuda_graph", "kv_cache", "weights")] * 2
    assert policy.status().result().weight_version == 1


def test_a_trainer_that_fails_leaves_the_router_shut(policy: rollout.ServerHandle) -> None:
    def train() -> rollout.Push:
        raise ValueError("loss is NaN")

    with pytest.raises(ValueError, match="loss is NaN"):
        my_step(policy, train)
    assert policy.status().result().gate == "holding"
    my_step(policy, lambda: fake_push(1))  # the next step continues from there
    assert policy.status().result().gate == "open"


def test_samples_come_back_with_the_version_that_drew_them(policy: rollout.ServerHandle) -> None:
    my_step(policy, lambda: fake_push(1))
    sampling = rollout.SamplingParams(max_new_tokens=3)
    with rollout.Driver(policy.url) as driver:
        groups = driver.rollout(
            1, [rollout.Prompt((1, 2))], group_size=2, sampling=sampling
        ).result()
    versions = [span.version for sample in groups[0] for span in sample.weight_versions]
    assert versions == ["1", "1"]
