"""A mixture of experts is pushed by four ranks, sharded as its trainer shards it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout import DeploymentHandle, RolloutConfig, launch
from rollout.testing.tiny_model import make_tiny_model
from tests.support.rank_processes import Ranks, served_seed

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DeploymentHandle]:
    model_path = make_tiny_model(tmp_path / "tiny", architecture="qwen3_moe", num_experts=4)
    settings = {
        "log_dir": str(tmp_path),
        "servers": {
            "policy": {
                "model_path": str(model_path),
                "groups": {"main": {"num_engines": 2, "engine": {"kind": "embedded"}}},
                "weights": {"bucket_bytes": 40_000},
            }
        },
    }
    with launch(RolloutConfig.from_dict(settings)) as deployment:
        yield deployment


def test_shards_of_every_kind_arrive_as_the_unsharded_checkpoint(
    run: DeploymentHandle, tmp_path: Path
) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    ranks = Ranks(run, folder, 4)
    try:
        for seed, command in enumerate(("megatron", "stacked", "push", "megatron"), 1):
            said = ranks.do(command, seed=seed)
            assert [one.get("version") for one in said] == [seed] * 4, (command, said)
            served_seed(run, seed)
    finally:
        ranks.end()
