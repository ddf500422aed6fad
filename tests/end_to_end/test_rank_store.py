"""What all ranks push is kept by the store, saved to disk, loaded in one call, or has a turn."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout import DeploymentHandle, RolloutConfig, launch
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.format.manifest import read_checkpoint_manifest
from rollout.weights.push.weight_push import WITHOUT_KV
from tests.support.processes import wait_until
from tests.support.rank_processes import Ranks, errors, served_seed

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(180)]
BUCKET_BYTES = 100_000


@contextmanager
def launched(folder: Path, architecture: str = "qwen3", **weights: Any) -> Iterator[Any]:
    run_id = f"rank-store-{uuid.uuid4().hex[:8]}"
    config = {
        "run_id": run_id,
        "log_dir": str(folder),
        "servers": {
            "policy": {
                "model_path": str(make_tiny_model(folder / "tiny", architecture=architecture)),
                "groups": {"main": {"engine": {"kind": "embedded", "cpus": 0.5}}},
                "health": {"probe_interval_s": 0.5, "probe_timeout_s": 1.0, "probes_to_dead": 3},
                "weights": {"bucket_bytes": BUCKET_BYTES, **weights},
            }
        },
    }
    with launch(RolloutConfig.from_dict(config), backend="local") as deployment:
        yield deployment
    assert not list(Path("/dev/shm").glob(f"rollout-store-*/{run_id}.*"))


@contextmanager
def with_ranks(run: DeploymentHandle, folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(run, folder, 2)
    try:
        yield ranks
    finally:
        ranks.end()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    """One engine and no store, for tests that leave both as they were."""
    with launched(tmp_path_factory.mktemp("run")) as run:
        yield run


@pytest.fixture(scope="module")
def plain_ranks(
    plain: DeploymentHandle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    with with_ranks(plain, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


def is_kept(run: DeploymentHandle) -> bool:
    status = run["policy"].status().result(30)
    return status.store is not None and status.store.version == status.weight_version


def model_bytes(run: DeploymentHandle) -> int:
    manifest = read_checkpoint_manifest(run.config.servers["policy"].model_path)
    assert manifest is not None
    return sum(spec.num_bytes for spec in manifest.tensors.values())


def come_back_without_the_trainer(run: DeploymentHandle, ranks: Ranks, seed: int) -> None:
    """Stop the trainer, kill the engine, and see it return with these weights."""

    def engine() -> Any:
        return run["policy"].status().result(30).groups[0].engines[0]

    before = engine()
    for rank in ranks.processes:
        rank.send_signal(signal.SIGSTOP)
    try:
        os.kill(before.pid, signal.SIGKILL)
        assert wait_until(
            lambda: (
                (engine().pid, engine().state) != (before.pid, "serving")
                and engine().state == "serving"
            ),
            90,
        )
        assert engine().weight_version == run["policy"].weight_version
        served_seed(run, seed)
    finally:
        for rank in ranks.processes:
            rank.send_signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "transport",
    [
        "shared_memory",
        pytest.param("distributed", marks=pytest.mark.chaos),
        pytest.param("by_value", marks=pytest.mark.chaos),
    ],
)
def test_a_killed_engine_has_what_all_ranks_pushed_while_they_are_stopped(
    tmp_path: Path, transport: str
) -> None:
    """Of the others: ``make test-chaos PYTEST_ARGS=tests/end_to_end/test_rank_store.py``."""
    store = {"spare_bytes": 0, "unit_bytes": 20_000}
    with (
        launched(tmp_path, transport=transport, store=store) as run,
        with_ranks(run, tmp_path) as ranks,
    ):
        for seed in (5, 6, 7):
            said = ranks.do("push", seed=seed)
            assert [one.get("version") for one in said] == [seed - 4] * 2, said
            assert wait_until(lambda: is_kept(run), 30), run["policy"].status().result(30).store
            # Both ranks copy, and the copies of one push are held, not of all.
            copied = [one["shm_bytes"] for one in said]
            assert min(copied) > 0
            assert sum(copied) < 1.2 * model_bytes(run)
        come_back_without_the_trainer(run, ranks, 7)
        assert [one.get("version") for one in ranks.do("streamed", seed=8)] == [4, 4]
        assert wait_until(lambda: is_kept(run), 30)
        come_back_without_the_trainer(run, ranks, 8)


@pytest.mark.slow
def test_a_checkpoint_of_all_ranks_is_on_disk_and_an_error_there_is_everybodys(
    plain: DeploymentHandle, plain_ranks: Ranks, tmp_path: Path
) -> None:
    before = plain["policy"].weight_version
    saved = str(tmp_path / "saved" / "{version}")
    said = plain_ranks.do("push_by", transport="disk", seed=5, disk_path=saved)
    assert [one.get("version") for one in said] == [before + 1] * 2, said
    served_seed(plain, 5)
    folder = tmp_path / "saved" / str(before + 1)
    assert (folder / "config.json").is_file()
    found = read_checkpoint_manifest(folder)
    wanted = read_checkpoint_manifest(plain.config.servers["policy"].model_path)
    assert found is not None
    assert wanted is not None
    assert found.tensors == wanted.tensors
    (tmp_path / "file").touch()
    wrong = str(tmp_path / "file" / "{version}")
    said = plain_ranks.do("push_by", transport="disk", seed=6, disk_path=wrong)
    assert len(errors(said)) == 1, said
    assert "weights.disk_path" in said[0]["error"]
    said = plain_ranks.do("push_by", transport="disk", seed=6, disk_path=saved, is_streamed=True)
    assert [one.get("version") for one in said] == [before + 2] * 2, said
    served_seed(plain, 6)


@pytest.mark.slow
def test_engines_that_pack_load_what_all_ranks_wrote_in_one_call(tmp_path: Path) -> None:
    with launched(tmp_path, "qwen3_moe") as run, with_ranks(run, tmp_path) as ranks:
        for seed in (5, 6):
            said = ranks.do("push_at_once", seed=seed)
            assert [one.get("version") for one in said] == [seed - 4] * 2, said
            served_seed(run, seed)
            # Nothing is loaded before all is written, so all of it is there.
            assert sum(one["shm_bytes"] for one in said) > model_bytes(run)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_turn_that_fails_on_one_rank_leaves_weights_without_kv_and_all_ranks_know(
    plain: DeploymentHandle, plain_ranks: Ranks, rank: int
) -> None:
    policy = plain["policy"]
    before = policy.weight_version
    policy.offload().result(60)
    said = plain_ranks.do("turn", seed=5, fails_on=rank)
    assert len(errors(said)) == 1, said
    assert f"rank {rank}: ValueError: the optimizer does not fit" in said[0]["error"]
    assert WITHOUT_KV in said[0]["error"]
    status = policy.status().result(30)
    assert (status.phase, status.gate) == ("verified", "holding")
    policy.serve().result(60)
    served_seed(plain, 5)
    policy.offload().result(60)
    said = plain_ranks.do("turn", seed=6)
    assert [one.get("version") for one in said] == [before + 2] * 2, said
    assert said[0]["phases"][-2:] == ["onload_kv", "continue_generation"]
    served_seed(plain, 6)
