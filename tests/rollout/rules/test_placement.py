"""GPUs and nodes to slots: order, sharing, and what does not fit."""

import pytest

from engines.protocol import WorkerType
from rollout.config import GroupConfig
from rollout.core.errors import PlacementError
from rollout.rules.placement import (
    Bundle,
    assign_slots,
    check_capacity,
    local_bundles,
    plan_placement,
)


def group(num_engines: int = 1, *, gpus: int = 0, cpus: float = 1.0, **more) -> GroupConfig:
    engine = {"gpus": gpus, "cpus": cpus}
    return GroupConfig.model_validate({"num_engines": num_engines, "engine": engine, **more})


def two_nodes(num_per_node: int) -> list[Bundle]:
    """Bundles that alternate between two nodes, as an order by address would have them."""
    return [
        Bundle(2 * gpu + node, f"node-{node}", (gpu,))
        for gpu in range(num_per_node)
        for node in range(2)
    ]


def test_neighbouring_gpus_of_an_engine_are_on_one_node() -> None:
    plan = plan_placement({"policy": {"main": group(4, gpus=2)}})
    slots = assign_slots(plan, two_nodes(4))["policy", "main"]
    assert [(slot.node_id, slot.gpu_ids) for slot in slots] == [
        ("node-0", (0, 1)),
        ("node-0", (2, 3)),
        ("node-1", (0, 1)),
        ("node-1", (2, 3)),
    ]
    assert slots[2].bundle_indices == (1, 3)


def test_gpus_are_ordered_by_number_not_by_text() -> None:
    plan = plan_placement({"policy": {"main": group(12, gpus=1)}})
    granted = [Bundle(index, "node", (11 - index,)) for index in range(12)]
    slots = assign_slots(plan, granted)["policy", "main"]
    assert [slot.gpu_ids for slot in slots] == [(gpu,) for gpu in range(12)]


def test_an_engine_never_straddles_two_nodes() -> None:
    plan = plan_placement({"policy": {"main": group(1, gpus=3)}})
    granted = [Bundle(0, "a", (0,)), Bundle(1, "a", (1,)), Bundle(2, "b", (0,))]
    message = "engine main-0 of server policy needs 3 GPUs on one node, .* are on a, b"
    with pytest.raises(PlacementError, match=message):
        assign_slots(plan, granted)


def test_offloading_groups_share_the_trainers_gpus_and_others_have_their_own() -> None:
    groups = {"apart": group(1, gpus=2, needs_offload=False), "shared": group(2, gpus=1)}
    plan = plan_placement({"policy": groups}, trainer_gpus=4)
    assert plan.shared == 4
    assert plan.spans["policy", "shared", 1] == range(1, 2)
    assert plan.spans["policy", "apart", 0] == range(4, 6)
    assert plan.totals() == {"CPU": 6.0, "GPU": 6.0}


def test_more_offloading_gpus_than_the_trainer_has_make_the_shared_part_larger() -> None:
    plan = plan_placement({"policy": {"main": group(3, gpus=2)}}, trainer_gpus=4)
    assert plan.shared == 6


def test_a_cpu_engine_gets_one_bundle_with_its_cores() -> None:
    plan = plan_placement({"policy": {"gpu": group(1, gpus=1), "cpu": group(2, cpus=2.5)}})
    slots = assign_slots(plan, local_bundles(plan, [5], 8))
    assert [slot.num_cpus for slot in slots["policy", "cpu"]] == [2.5, 2.5]
    assert [slot.gpu_ids for slot in slots["policy", "cpu"]] == [(), ()]
    assert slots["policy", "gpu"][0].gpu_ids == (5,)
    assert plan.totals() == {"GPU": 1.0, "CPU": 6.0}


def test_a_placeholder_reserves_gpus_and_needs_no_cpu_bundle() -> None:
    without = group(worker_type=WorkerType.PLACEHOLDER)
    reserved = group(2, gpus=1, worker_type=WorkerType.PLACEHOLDER)
    plan = plan_placement({"policy": {"none": without, "some": reserved, "main": group(gpus=1)}})
    assert len(plan.bundles) == 3
    assert plan.spans["policy", "main", 0] == range(2, 3)


def test_missing_bundles_are_refused() -> None:
    plan = plan_placement({"policy": {"main": group(4)}})
    with pytest.raises(PlacementError, match="placement needs 4 bundles, 1 were granted"):
        assign_slots(plan, [Bundle(0, "local")])


def test_a_plan_that_can_never_be_granted_has_what_is_available() -> None:
    plan = plan_placement({"policy": {"main": group(8, gpus=2)}})
    with pytest.raises(
        PlacementError, match="placement needs 16 GPUs, the cluster has 8"
    ) as caught:
        check_capacity(plan, {"CPU": 64.0, "GPU": 8.0}, "the cluster")
    assert caught.value.available == {"CPU": 64.0, "GPU": 8.0}
    check_capacity(plan, {"CPU": 16.0, "GPU": 16.0}, "the cluster")


def test_this_machine_alone_grants_its_gpus_in_order_or_reports_how_many_it_has() -> None:
    plan = plan_placement({"policy": {"main": group(2, gpus=1)}})
    assert [bundle.gpu_ids for bundle in local_bundles(plan, [3, 7], 1)] == [(3,), (7,)]
    with pytest.raises(PlacementError, match="placement needs 2 GPUs, this machine has 1"):
        local_bundles(plan, [0], 1)
