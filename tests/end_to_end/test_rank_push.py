"""Weights are pushed by every rank of a trainer, and a fault of one ends the push on all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout import DeploymentHandle, launch
from rollout.control.server.server import RolloutServer
from rollout.observability.timeline.export import chrome_trace
from rollout.observability.timeline.span import Kind
from rollout.weights.format.manifest import read_checkpoint_manifest
from tests.support.kinds import chaos_for
from tests.support.rank_processes import BUCKET_BYTES, Ranks, errors, served_seed, tiny_policy

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(180)]

RANK_TIMEOUT_S = 4
# With both in ``make test-chaos PYTEST_ARGS=tests/end_to_end/test_rank_push.py``.
UNTIED_IN_CHAOS = chaos_for("untied")


@pytest.fixture(scope="module", params=["untied", "tied"])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle]:
    folder = tmp_path_factory.mktemp("run")
    with launch(tiny_policy(folder, tie_embeddings=request.param == "tied")) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def ranks(run: DeploymentHandle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks that outlive the faults of all tests; they are new after one was killed."""
    found = Ranks(run, tmp_path_factory.mktemp("ranks"), 2)
    yield found
    found.end()


def model_bytes(run: DeploymentHandle) -> int:
    manifest = read_checkpoint_manifest(run.config.servers["policy"].model_path)
    assert manifest is not None
    return sum(
        torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta").nbytes
        for spec in manifest.tensors.values()
    )


def test_all_ranks_push_and_get_one_report(run: DeploymentHandle, ranks: Ranks) -> None:
    before = run["policy"].weight_version
    assert ranks.writers == [0, 1]
    said = ranks.do("push", seed=5)
    assert [one.get("version") for one in said] == [before + 1] * 2, said
    served_seed(run, 5)
    # Each rank has written its share, and no rank more than that and one bucket.
    total = sum(one["shm_bytes"] for one in said)
    assert all(0 < one["shm_bytes"] <= total / 2 + 2 * BUCKET_BYTES for one in said)
    run["policy"].offload().result(60)
    said = ranks.do("push", seed=6)
    assert [one.get("version") for one in said] == [before + 2] * 2, said
    assert "onload_kv" in said[0]["phases"]
    served_seed(run, 6)
    said = ranks.do("compiled", seed=7)
    assert [one.get("version") for one in said] == [before + 3] * 2, said
    served_seed(run, 7)
    said = ranks.do("push", seed=8, version=before + 9)
    assert [one.get("version") for one in said] == [before + 9] * 2, said


@UNTIED_IN_CHAOS
def test_all_ranks_offload_together_or_not_at_all(run: DeploymentHandle, ranks: Ranks) -> None:
    before = run["policy"].weight_version
    ranks.do("push", seed=15)
    said = ranks.do("offload")
    assert [one.get("phases") for one in said] == [
        ["pause_generation", "flush_cache", "release_memory_occupation"]
    ] * 2, said
    assert run["policy"].status().result(30).gate == "holding"
    assert [one.get("version") for one in ranks.do("push", seed=16)] == [before + 2] * 2
    served_seed(run, 16)
    said = ranks.do("offload", without=1)
    assert "rank 1 did not report at the begin of the offload within 4 s" in said[0]["error"]
    assert "rank 0 has sent nothing within 4 s" in said[1]["error"]
    assert run["policy"].status().result(30).gate == "open"
    assert [one.get("version") for one in ranks.do("push", seed=17)] == [before + 3] * 2


@UNTIED_IN_CHAOS
def test_the_report_has_the_seconds_and_bytes_of_every_rank(
    run: DeploymentHandle, ranks: Ranks
) -> None:
    said = ranks.do("push", seed=12)
    stages = said[0]["stages"]
    assert said[1]["stages"] == stages
    num_bytes = model_bytes(run)
    assert {(one["rank"], one["stage"]) for one in stages} == {
        *((rank, stage) for rank in (0, 1) for stage in ("gather", "copy")),
        (0, "engine"),
    }
    assert all(one["elapsed_s"] > 0 for one in stages), stages
    assert all(one["num_bytes"] == num_bytes for one in stages if one["stage"] != "copy")
    copied = {one["rank"]: one for one in stages if one["stage"] == "copy"}
    assert sum(one["num_bytes"] for one in copied.values()) == num_bytes
    assert max(one["num_bytes"] for one in copied.values()) <= num_bytes / 2 + BUCKET_BYTES
    assert {one["route"] for one in copied.values()} == {"shared_memory"}


@UNTIED_IN_CHAOS
def test_the_trace_of_a_push_has_a_lane_for_every_rank(
    run: DeploymentHandle, ranks: Ranks, tmp_path: Path
) -> None:
    version = ranks.do("push", seed=13)[0]["version"]
    spans = run["policy"]._caller.call(RolloutServer.observe, {}).result(30).timelines["policy"]
    pushed = [span for span in spans.spans if version == span.weight_version]
    (update,) = [span for span in pushed if span.name == "update_weights"]
    of_ranks = [span for span in pushed if span.kind is Kind.RANK]
    # The trainer's processes and the server compare Unix seconds of one host here.
    assert all(update.start_s - 0.1 <= span.start_s <= update.end_s + 0.1 for span in of_ranks)
    trace = chrome_trace(pushed)["traceEvents"]
    lanes = {one["args"]["name"]: one["tid"] for one in trace if one["name"] == "thread_name"}
    assert {"rank 0", "rank 1"} <= lanes.keys()
    for name in ("rank 0", "rank 1"):
        lane = [one for one in trace if one["ph"] == "X" and one["tid"] == lanes[name]]
        assert {"gather", "copy"} <= {one["name"] for one in lane}
        for before, after in itertools.pairwise(lane):
            assert before["ts"] + before["dur"] <= after["ts"] + 1


@UNTIED_IN_CHAOS
def test_rank_0_sends_by_value_and_by_broadcast(run: DeploymentHandle, ranks: Ranks) -> None:
    before = run["policy"].weight_version
    for number, transport in enumerate(("by_value", "distributed", "distributed"), 1):
        said = ranks.do("push_by", transport=transport, seed=20 + number)
        assert [one.get("version") for one in said] == [before + number] * 2, said
        served_seed(run, 20 + number)
        sent = {one["rank"]: one for one in said[1]["stages"] if one["stage"] == "copy"}
        assert [sent[rank]["num_bytes"] for rank in (0, 1)] == [model_bytes(run), 0]
        assert sent[0]["route"] == transport
        (engine,) = [one for one in said[1]["stages"] if one["stage"] == "engine"]
        assert 0 < engine["elapsed_s"] < said[0]["seconds"]
    said = ranks.do("push_by", transport="distributed", seed=30, is_streamed=True)
    assert [one.get("version") for one in said] == [before + 4] * 2, said
    served_seed(run, 30)


@UNTIED_IN_CHAOS
def test_tensors_are_cast_before_they_are_gathered(run: DeploymentHandle, ranks: Ranks) -> None:
    said = ranks.do("push_wide", seed=40)
    assert len({one.get("version", one.get("error")) for one in said}) == 1
    assert "version" in said[0], said
    served_seed(run, 40)


@UNTIED_IN_CHAOS
def test_a_generator_is_consumed_bucket_by_bucket(run: DeploymentHandle, ranks: Ranks) -> None:
    before = run["policy"].weight_version
    said = ranks.do("streamed", seed=9)
    assert [one.get("version") for one in said] == [before + 1] * 2, said
    served_seed(run, 9)
    said = ranks.do("streamed", seed=10, without="model.norm.weight")
    assert len(errors(said)) == 1
    assert "lacks 1 of" in said[0]["error"]
    assert run["policy"].status().result(30).gate != "open"
    said = ranks.do("push", seed=11)
    assert [one.get("version") for one in said] == [before + 2] * 2, said
    served_seed(run, 11)


@pytest.mark.parametrize("run", ["tied"], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_with_other_tensors_is_named_before_anything_is_gathered(
    run: DeploymentHandle, ranks: Ranks, rank: int
) -> None:
    before = run["policy"].weight_version
    said = ranks.do("other_names", rank=rank)
    assert len(errors(said)) == 1, said
    assert "another" in said[0]["error"] if rank == 0 else "rank 1: it has no" in said[0]["error"]
    assert run["policy"].status().result(30).gate == "open"
    assert ranks.do("push", seed=3)[1]["version"] == before + 1


@pytest.mark.parametrize("run", ["tied"], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_named_on_all_ranks(
    run: DeploymentHandle, ranks: Ranks, rank: int
) -> None:
    before = run["policy"].weight_version
    said = ranks.do("raises", rank=rank)
    assert len(errors(said)) == 1, said
    assert f"rank {rank}: ValueError: a bad name map at" in said[0]["error"]
    assert max(one["seconds"] for one in said) < 4 * RANK_TIMEOUT_S
    assert run["policy"].status().result(30).gate != "open"
    assert [one["version"] for one in ranks.do("push", seed=4)] == [before + 1] * 2
    served_seed(run, 4)


@pytest.mark.parametrize("run", ["tied"], indirect=True)
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.chaos)])
def test_a_rank_that_is_killed_in_a_push_ends_it_on_the_other(
    run: DeploymentHandle, ranks: Ranks, tmp_path: Path, rank: int
) -> None:
    before = run["policy"].weight_version
    said = ranks.do("dies", rank=rank)
    assert said[rank] == {}
    other = said[1 - rank]
    assert other["type"] == "RankFailure"
    assert f"rank {rank} " in other["error"]
    assert other["seconds"] < 4 * RANK_TIMEOUT_S
    assert run["policy"].status().result(30).gate != "open"
    ranks.restart(tmp_path)
    assert [one["version"] for one in ranks.do("push", seed=4)] == [before + 1] * 2
    served_seed(run, 4)


@pytest.mark.parametrize("run", ["tied"], indirect=True)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.chaos), 1])
def test_a_rank_may_be_late_but_not_too_late(
    run: DeploymentHandle, ranks: Ranks, rank: int
) -> None:
    before = run["policy"].weight_version
    assert [one["version"] for one in ranks.do("late", rank=rank, seconds=1)] == [before + 1] * 2
    said = ranks.do_without(rank, "stays_away", rank=rank)
    assert len(errors(said)) == 1, said
    assert f"rank {rank} " in said[0]["error"]
    assert said[1 - rank]["seconds"] < 1.8 * RANK_TIMEOUT_S
    assert run["policy"].status().result(30).gate == "open"
    assert [one["version"] for one in ranks.do("push", seed=4)] == [before + 2] * 2


@pytest.mark.parametrize("run", ["untied"], indirect=True)
def test_four_ranks_write_a_quarter_each(run: DeploymentHandle, tmp_path: Path) -> None:
    ranks = Ranks(run, tmp_path, 4)
    try:
        assert ranks.writers == [0, 1, 2, 3]
        said = ranks.do("push", seed=5)
        total = sum(one["shm_bytes"] for one in said)
        assert all(0 < one["shm_bytes"] <= total / 4 + BUCKET_BYTES for one in said)
        served_seed(run, 5)
    finally:
        ranks.end()
