"""Servers on the same GPUs, as actors: each in its turn, beside a trainer with whole bundles."""

import importlib
from pathlib import Path

from engines.fake.http_fake import HttpFakeLauncher
from tests.support.builders import push
from tests.support.ray_worlds import World
from tests.support.served_fakes import TIMEOUT_S, stacked_config


class Rank:
    """One rank of a trainer."""

    def num_gpus(self) -> int:
        return len(importlib.import_module("ray").get_gpu_ids())


def test_each_server_has_its_turn_and_the_trainer_all_of_each_gpu(
    world: World, tmp_path: Path
) -> None:
    launch = world.load("launch").launch_ray
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    with launch(stacked_config(tmp_path), launcher=HttpFakeLauncher()) as deployment:

        def phases() -> list[str]:
            return [one.phase for one in deployment.status().result(TIMEOUT_S).values()]

        assert phases() == ["serving", "offloaded"]
        slots = deployment.trainer_slots
        on_gpu = [[(one.server, one.engine_id, one.tp_rank) for one in s.engines] for s in slots]
        assert on_gpu == [
            [("policy", "main-0", 0), ("reference", "main-0", 0)],
            [("policy", "main-1", 0), ("reference", "main-0", 1)],
        ]
        ranks = []
        for slot in slots:
            place = strategies.PlacementGroupSchedulingStrategy(
                placement_group=deployment.placement_group,
                placement_group_bundle_index=slot.bundle_index,
            )
            options = {"num_cpus": 1, "num_gpus": 1, "scheduling_strategy": place}
            ranks.append(world.ray.remote(Rank).options(**options).remote())
        calls = [rank.num_gpus.remote() for rank in ranks]
        assert world.ray.get(calls, timeout=60) == [1, 1]
        policy, reference = deployment["policy"], deployment["reference"]
        policy.offload().result(TIMEOUT_S)
        reference.serve().result(TIMEOUT_S)
        assert phases() == ["offloaded", "serving"]
        reference.offload().result(TIMEOUT_S)
        assert policy.push(push(1)).result(TIMEOUT_S).weight_version == 1
        assert phases() == ["serving", "offloaded"]
        for rank in ranks:
            world.ray.kill(rank)
