"""Placement on a cluster: which GPUs where, and the error when there are not enough."""

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from rollout.config import GroupConfig
from rollout.core.errors import PlacementError
from rollout.core.types import NodeShare
from rollout.rules.placement import Bundle, PlacementPlan, assign_slots, plan_placement
from tests.support.kinds import chaos_for
from tests.support.processes import wait_until
from tests.support.ray_worlds import NUM_GPUS, World, stub_world
from tests.support.served_fakes import TIMEOUT_S, launched

TWO_NODES = ({"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4})


def plan(num_engines: int, gpus: int = 1, trainer_gpus: int = 0, **more: Any) -> PlacementPlan:
    group = GroupConfig.model_validate(
        {"num_engines": num_engines, "engine": {"kind": "embedded", "gpus": gpus, **more}}
    )
    return plan_placement({"policy": {"main": group}}, trainer_gpus=trainer_gpus)


@contextmanager
def reserved(world: World, of: PlacementPlan) -> Iterator[tuple[Any, list[Bundle]]]:
    group, bundles = world.load("placement_group").reserve(of, timeout_s=TIMEOUT_S)
    try:
        yield group, bundles
    finally:
        world.ray.util.remove_placement_group(group)


def free_gpus(world: World) -> float:
    resources: Mapping[str, float] = world.ray.available_resources()
    return resources.get("GPU", 0.0)


def all_free(world: World) -> bool:
    return wait_until(lambda: free_gpus(world) == world.ray.cluster_resources()["GPU"], TIMEOUT_S)


def test_every_gpu_bundle_is_asked_where_it_is_and_which_gpu_it_has(world: World) -> None:
    assert all_free(world)
    with reserved(world, plan(2, gpus=2)) as (_, bundles):
        assert sorted(gpu_id for one in bundles for gpu_id in one.gpu_ids) == [0, 1, 2, 3]
        assert {one.node_id for one in bundles} == {world.nodes()[0]}
        assert [one.index for one in bundles] == [0, 1, 2, 3]


def test_a_cpu_engine_needs_no_gpu(world: World) -> None:
    with reserved(world, plan(3, gpus=0, cpus=2)) as (_, bundles):
        assert [one.gpu_ids for one in bundles] == [(), (), ()]


def test_more_gpus_than_the_cluster_has_are_refused_at_once(world: World) -> None:
    with pytest.raises(PlacementError, match="placement needs 5 GPUs, the cluster has 4") as caught:
        world.load("placement_group").reserve(plan(5), timeout_s=3600)
    assert caught.value.requested == {"CPU": 5.0, "GPU": 5.0}
    assert caught.value.available["GPU"] == NUM_GPUS
    assert all_free(world)


def test_gpus_that_somebody_else_holds_are_missed_in_words_and_no_longer_asked_for(
    world: World,
) -> None:
    assert all_free(world)
    with (
        reserved(world, plan(3)),
        pytest.raises(
            PlacementError, match=r"did not grant 2 GPUs, 2 CPUs within 0\.5 s"
        ) as caught,
    ):
        world.load("placement_group").reserve(plan(2), timeout_s=0.5)
    assert caught.value.requested == {"CPU": 2.0, "GPU": 2.0}
    assert all_free(world)


@chaos_for("ray")
def test_engines_start_on_the_gpus_of_their_slots(world: World, tmp_path: Any) -> None:
    groups = {"main": {"num_engines": 2, "engine": {"kind": "sglang", "gpus": 2}}}
    cluster = {"trainer_gpus": 4}
    launch = world.load("launch").launch_ray
    with launched(launch, tmp_path, groups, run_id="gpus", cluster=cluster) as handle:
        (group,) = handle["policy"].status().result(TIMEOUT_S).groups
        node_id = world.nodes()[0]
        assert [one.node_id for one in group.engines] == [node_id] * 2
        gpus = [[gpu.uuid for gpu in one.gpus] for one in group.engines]
        assert gpus == [["GPU-0", "GPU-1"], ["GPU-2", "GPU-3"]]
        assert len(world.ray.util.placement_group_table(handle.placement_group)["bundles"]) == 4
    assert all_free(world)


@pytest.mark.parametrize("seed", range(10))
def test_slots_are_in_order_of_node_and_gpu_however_bundles_were_granted(seed: int) -> None:
    with stub_world(TWO_NODES, seed) as world, reserved(world, plan(4, gpus=2)) as (_, bundles):
        slots = assign_slots(plan(4, gpus=2), bundles)["policy", "main"]
    first, second = sorted({one.node_id for one in bundles})
    assert [(one.node_id, one.gpu_ids) for one in slots] == [
        (first, (0, 1)),
        (first, (2, 3)),
        (second, (0, 1)),
        (second, (2, 3)),
    ]
    of_bundle = {one.index: one for one in bundles}
    for slot in slots:
        held = [of_bundle[index] for index in slot.bundle_indices]
        assert tuple(gpu_id for one in held for gpu_id in one.gpu_ids) == slot.gpu_ids


def test_bundles_that_nobody_can_look_at_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[int]:
        raise RuntimeError("no driver")

    with stub_world() as world:
        monkeypatch.setattr(world.ray, "get_gpu_ids", broken)
        with pytest.raises(RuntimeError, match="no driver"):
            world.load("placement_group").reserve(plan(2), timeout_s=TIMEOUT_S)
        assert free_gpus(world) == NUM_GPUS


MOVED = NodeShare("lost", (0, 1), (4, 5))


async def share_on_another_node(
    world: World, patch: pytest.MonkeyPatch, reply: Callable[[int], Awaitable[list[int]]]
) -> NodeShare:
    """``current_share`` after the bundles of ``MOVED`` have moved; ``reply`` has their GPU ids."""
    nodes = world.load("nodes")
    (node_id,) = world.nodes()
    table = {"bundles_to_node_id": dict.fromkeys(MOVED.bundle_indices, node_id)}
    patch.setattr(nodes, "placement_group_table", lambda group: table)
    patch.setattr(nodes, "gpu_ids_of_bundle", lambda group, index: reply(index))
    patch.setattr(world.ray, "cancel", lambda object_ref: None)
    share: NodeShare = await nodes.current_share("main-0", None, MOVED, timeout_s=0.2)
    return share


async def test_moved_bundles_report_their_gpus_at_the_same_time(
    stub: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = asyncio.Barrier(len(MOVED.bundle_indices))

    async def reply(index: int) -> list[int]:
        await both.wait()
        return [index + 6]

    share = await share_on_another_node(stub, monkeypatch, reply)
    assert share == NodeShare(stub.nodes()[0], (0, 1), (6, 7))


async def test_a_node_that_reports_no_gpus_is_named(
    stub: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reply(index: int) -> list[int]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(PlacementError, match=r"main-0: its bundles moved to node .* within 0\.2 s"):
        await share_on_another_node(stub, monkeypatch, reply)


@pytest.fixture
def stub() -> Iterator[World]:
    with stub_world() as world:
        yield world


class Trainer:
    """An actor that the deployment did not start."""

    def model(self) -> str:
        return "the model"


def in_group(world: World, group: Any) -> Any:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    place = strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=0
    )
    options = {"num_cpus": 0.5, "num_gpus": 0, "scheduling_strategy": place}
    return world.ray.remote(Trainer).options(**options).remote()


def test_a_stop_leaves_the_placement_group_to_a_trainer_that_lives_in_it(
    world: World,
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launching = world.load("launch")
    # It would be waited out, since the trainer goes on.
    monkeypatch.setattr(launching, "_UNUSED_TIMEOUT_S", 0.1)
    launch = launching.launch_ray
    groups = {"main": {"num_engines": 1, "engine": {"gpus": 1}}}
    with launched(launch, tmp_path, groups, run_id="left") as handle:
        trainer = in_group(world, handle.placement_group)
        assert world.ray.get(trainer.model.remote(), timeout=TIMEOUT_S) == "the model"
    assert world.ray.get(trainer.model.remote(), timeout=TIMEOUT_S) == "the model"
    assert "stays: actors or tasks that this run did not start use" in caplog.text
    assert world.live_actors() == ["Trainer"]
    world.ray.kill(trainer)
    assert world.load("placement_group").remove_unused(handle.placement_group, timeout_s=TIMEOUT_S)
    assert all_free(world)


def test_a_resource_is_in_use_if_less_is_available_than_there_is() -> None:
    with stub_world() as world:
        used_names = world.load("placement_group").used_names
        total = {"CPU": 4.0, "GPU_group_ab": 1.0, "bundle_group_ab": 1000.0, "memory": 5.0}
        free = {"CPU": 3.0, "GPU_group_ab": 1.0, "bundle_group_ab": 999.999}
        assert used_names(total, free, "_group_ab") == ["bundle_group_ab"]
        assert used_names(total, free, "") == ["CPU", "bundle_group_ab"]
        assert used_names(total, total, "") == []
