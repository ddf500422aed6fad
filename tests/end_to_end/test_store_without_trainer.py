"""The trainer is stopped, engine and agent are killed: the policy comes back from the store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import FOR_VLLM, make_plain_model
from tests.support.ray_worlds import RayWorld
from tests.support.real_policy import one_engine
from tests.support.store_without_trainer import check


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.embedded
@pytest.mark.timeout(240)
def test_an_engine_comes_back_with_the_current_policy_while_the_trainer_is_stopped(
    ray_cluster: RayWorld, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    from rollout.testing.tiny_model import make_tiny_model

    model_path = make_tiny_model(tmp_path / "model")
    address = ray_cluster.ray.get_runtime_context().gcs_address
    check(address, model_path, tmp_path, {"kind": "embedded", "cpus": 0.5})


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param("sglang", {}, marks=pytest.mark.sglang),
        pytest.param("vllm", FOR_VLLM, marks=pytest.mark.vllm),
    ],
)
@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_real_engine_comes_back_with_the_current_policy_while_the_trainer_is_stopped(
    kind: str, shape: dict[str, int], tmp_path: Path
) -> None:
    model_path = make_plain_model(tmp_path / "model", 0, **shape)
    check("local", model_path, tmp_path, one_engine(kind)["engine"])
