"""Tensors that several ranks have whole are compared, a few in each push."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import WeightMismatch
from rollout.weights.push.push import PushRequest
from rollout.weights.ranks.messages import Fits, decode, encode
from rollout.weights.ranks.protocol import check_replicas
from tests.support.still_server import StillServer, server_config

torch = pytest.importorskip("torch")
from rollout.weights.ranks.follower import Follower  # noqa: E402
from rollout.weights.ranks.leader import Leader, next_sample  # noqa: E402
from rollout.weights.ranks.trainer_rank import TrainerRank  # noqa: E402

pytestmark = pytest.mark.torch
NUM_TENSORS = 20


def replica(**changed: float) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    made = {f"w{index}": torch.randn(8, 8, generator=draw) for index in range(NUM_TENSORS)}
    for name, value in changed.items():
        made[name][3, 3] += value
    return made


class Ranks:
    """The ranks of a trainer, without processes: each has its tensors."""

    def __init__(self, folder: Path, tensors: Sequence[Any]) -> None:
        config, hosts = server_config(folder, shared_memory_path=str(folder)), [0] * len(tensors)
        self.ranks = [TrainerRank(config, rank, hosts) for rank in range(len(tensors))]
        self.server = StillServer()
        self.tensors = tensors

    def push(self, version: int) -> Sequence[str]:
        """The begin of a push, up to the comparison; returns what is compared."""
        followers = [
            Follower(rank, self.server, PushRequest(tensors, version))
            for rank, tensors in zip(self.ranks, self.tensors, strict=True)
        ]
        leader = Leader(
            self.server,
            followers[0],
            PushRequest({}).contents("full"),
            may_stream=True,
            streams=True,
        )
        plan = leader.decide([one.ready() for one in followers])
        try:
            fits = []
            for follower in followers:
                follower.prepare(plan)
                fits.append(decode(encode(Fits(follower.digests_of(plan.compared)))))
            check_replicas(fits)
        finally:
            for follower in followers:
                follower.resources.close()
        return plan.compared


def test_each_tensor_has_its_turn_and_equal_replicas_pass(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, [replica(), replica(), replica()])
    compared = [name for version in range(1, 6) for name in ranks.push(version)]
    assert compared == [f"w{index % NUM_TENSORS}" for index in range(40)]


def test_a_replica_out_of_step_is_refused_by_rank_and_tensor(tmp_path: Path) -> None:
    after_a_step = {f"w{index}": 1e-3 for index in range(NUM_TENSORS)}
    ranks = Ranks(tmp_path, [replica(), replica(**after_a_step), replica()])
    with pytest.raises(
        WeightMismatch, match="rank 1 has other values of tensor 'w0' than rank 0, 2"
    ):
        ranks.push(1)


def test_one_bit_of_one_tensor_is_found_when_it_has_its_turn(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, [replica(), replica(w13=2.0**-20)])
    ranks.push(1)
    with pytest.raises(WeightMismatch, match="'w13'") as caught:
        ranks.push(2)
    assert caught.value.tensor == "w13"


def test_without_a_majority_the_ranks_on_both_sides_are_named() -> None:
    with pytest.raises(WeightMismatch, match="rank 1 has other values of tensor 'w' than rank 0:"):
        check_replicas([Fits({"w": "sums:a"}), Fits({"w": "sums:b"})])
    # A rank that has only a shard says nothing.
    check_replicas([Fits({"w": "sums:a"}), Fits(), Fits({"w": "sums:a"})])


def test_what_is_compared_in_one_push_is_bounded() -> None:
    sizes = {"embedding": 1 << 30, "norm": 1 << 10, "head": 1 << 30, "bias": 1 << 4}
    assert next_sample(sizes, 0) == ("embedding",)
    assert next_sample(sizes, 1) == ("norm", "head")
    assert next_sample(sizes, 3) == ("bias", "embedding")
    assert next_sample(sizes, 4) == ("embedding",)
    assert next_sample({}, 5) == ()
    assert next_sample({"only": 8}, 7) == ("only",)


def test_a_generator_is_compared_bucket_by_bucket(tmp_path: Path) -> None:
    config = server_config(tmp_path, shared_memory_path=str(tmp_path), bucket_bytes=1024)
    server, hosts = StillServer(), [0, 0]
    followers = [
        Follower(TrainerRank(config, rank, hosts), server, PushRequest(iter(made.items()), 1))
        for rank, made in enumerate([replica(), replica(w5=1.0, w4=1.0, w6=1.0, w7=1.0)])
    ]
    contents = PushRequest({}).contents("full")
    leader = Leader(server, followers[0], contents, may_stream=True, streams=True)
    plan = leader.decide([one.ready() for one in followers])
    assert plan.compared == ()
    for follower in followers:
        follower.prepare(plan)
        assert follower.digests_of(plan.compared) == {}
    shares = [[one.make(index)[0] for one in followers] for index in range(5)]
    check_replicas(shares[0])
    with pytest.raises(WeightMismatch, match=r"rank 1 has other values of tensor 'w[4-7]'"):
        check_replicas(shares[1])
    check_replicas(shares[2])
    for follower in followers:
        follower.resources.close()
