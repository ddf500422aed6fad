"""GPUs and nodes to slots: order, sharing, stacking, and what does not fit."""

from collections.abc import Mapping

import pytest

from engines.protocol import WorkerType
from rollout.config import GroupConfig
from rollout.core.errors import PlacementError
from rollout.core.types import EngineRank, TrainerSlot
from rollout.rules.placement import (
    Bundle,
    PlacementPlan,
    assign_slots,
    bundles_of_group,
    check_capacity,
    local_bundles,
    plan_placement,
    trainer_slots,
)


def group(num_engines: int = 1, *, gpus: int = 0, cpus: float = 1.0, **more) -> GroupConfig:
    engine = {"kind": "fake", "gpus": gpus, "cpus": cpus}
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


def spans_of(plan: PlacementPlan) -> dict[str, range]:
    """The positions of the first engine of each server."""
    return {server: span for (server, _, index), span in plan.spans.items() if not index}


def servers(**gpus: int) -> dict[str, dict[str, GroupConfig]]:
    """Servers with one offloading engine each, on so many GPUs."""
    return {name: {"main": group(gpus=num)} for name, num in gpus.items()}


def test_servers_that_fill_the_trainers_gpus_are_stacked_on_them() -> None:
    plan = plan_placement(servers(policy=8, reference=8, reward=8), trainer_gpus=8)
    assert set(spans_of(plan).values()) == {range(8)}
    assert plan.stacked == {"reference": ["policy"], "reward": ["policy", "reference"]}
    assert plan.totals() == {"GPU": 8.0, "CPU": 8.0}


def test_servers_are_side_by_side_while_the_trainers_gpus_last() -> None:
    plan = plan_placement(servers(policy=8, reference=4, reward=4), trainer_gpus=8)
    assert spans_of(plan) == {"policy": range(8), "reference": range(4), "reward": range(4, 8)}
    assert plan.stacked == {"reference": ["policy"], "reward": ["policy"]}
    assert plan_placement(servers(policy=4, reward=4), trainer_gpus=8).stacked == {}


def test_without_a_number_of_trainer_gpus_nothing_is_stacked() -> None:
    plan = plan_placement(servers(policy=2, reference=2))
    assert spans_of(plan) == {"policy": range(2), "reference": range(2, 4)}
    assert (plan.shared, plan.stacked) == (4, {})


def test_a_server_beside_another_begins_at_a_multiple_of_its_engines() -> None:
    """Else its engine would straddle two nodes of four GPUs."""
    plan = plan_placement(servers(policy=1, reference=4), trainer_gpus=8)
    assert spans_of(plan) == {"policy": range(1), "reference": range(4, 8)}
    assert {slot.node_id for slot in assign_slots(plan, two_nodes(4))["reference", "main"]} == {
        "node-1"
    }


def test_groups_of_one_server_are_never_on_the_same_gpu() -> None:
    groups = {"one": group(2, gpus=2), "two": group(1, gpus=2)}
    plan = plan_placement({"policy": groups, "reference": groups}, trainer_gpus=4)
    assert plan.shared == 6
    for server in ("policy", "reference"):
        spans = [span for key, span in plan.spans.items() if key[0] == server]
        assert sorted(position for span in spans for position in span) == list(range(6))


def test_a_server_on_gpus_of_its_own_is_not_stacked() -> None:
    apart = {"main": group(gpus=2, needs_offload=False)}
    plan = plan_placement({**servers(policy=2), "judge": apart}, trainer_gpus=2)
    assert spans_of(plan)["judge"] == range(2, 4)
    assert plan.stacked == {}


def test_a_placeholder_is_no_engine_on_a_gpu() -> None:
    reserved = {"main": group(gpus=2, worker_type=WorkerType.PLACEHOLDER)}
    plan = plan_placement({**servers(policy=2), "other": reserved}, trainer_gpus=2)
    assert plan.stacked == {}
    slots = trainer_slots(plan, local_bundles(plan, [0, 1], 8))
    assert [[engine.server for engine in slot.engines] for slot in slots] == [["policy"]] * 2


def test_each_rank_of_the_trainer_is_on_the_gpu_of_the_engine_ranks_it_names() -> None:
    groups = {"apart": group(1, gpus=2, needs_offload=False), "shared": group(2, gpus=2)}
    plan = plan_placement({"policy": groups, **servers(reward=3)}, trainer_gpus=4)
    granted = two_nodes(3)
    slots = trainer_slots(plan, granted)
    assert [slot.rank for slot in slots] == [0, 1, 2, 3]
    # Six bundles alternate between the nodes; the first three of the order are on node-0.
    assert [(slot.bundle_index, slot.node_id, slot.gpu_id) for slot in slots] == [
        (0, "node-0", 0),
        (2, "node-0", 1),
        (4, "node-0", 2),
        (1, "node-1", 0),
    ]
    assert slots[3].engines == (EngineRank("policy", "shared-1", 1),)
    assert slots[2].engines == (
        EngineRank("policy", "shared-1", 0),
        EngineRank("reward", "main-0", 2),
    )


def test_the_engine_of_a_trainer_slot_has_that_gpu_at_that_rank() -> None:
    plan = plan_placement(servers(policy=4, reference=2, reward=2), trainer_gpus=4)
    granted = [Bundle(index, "node", (3 - index,)) for index in range(4)]
    slots = assign_slots(plan, granted)
    for slot in trainer_slots(plan, granted):
        assert slot.engines
        for engine in slot.engines:
            (of_engine,) = slots[engine.server, "main"]
            assert of_engine.gpu_ids[engine.tp_rank] == slot.gpu_id
            assert of_engine.bundle_indices[engine.tp_rank] == slot.bundle_index
            assert of_engine.shares_gpus


def test_without_ray_rank_r_has_the_gpu_that_torch_calls_r() -> None:
    plan = plan_placement(servers(policy=3), trainer_gpus=3)
    slots = trainer_slots(plan, local_bundles(plan, [7, "GPU-b", "GPU-a"], 8))
    assert [(slot.rank, slot.gpu_id) for slot in slots] == [(0, 7), (1, "GPU-b"), (2, "GPU-a")]


def test_a_gpu_of_the_trainer_without_an_engine_is_a_slot_too() -> None:
    plan = plan_placement(servers(policy=1), trainer_gpus=2)
    assert trainer_slots(plan, local_bundles(plan, [3, "GPU-7"], 8))[1] == TrainerSlot(
        1, None, "local", "GPU-7"
    )


ONE_GPU = {"GPU": 1.0, "CPU": 1.0}


@pytest.mark.parametrize(
    ("resources", "named", "said"),
    [
        ([ONE_GPU] * 4, [0, 4], "bundles names 4, and the placement group has 4 bundles: 0 to 3"),
        ([ONE_GPU] * 4, [0, -1], "bundles names -1, and the placement group has 4 bundles"),
        ([ONE_GPU] * 4, [1, 1], "bundles names 1 twice"),
        ([ONE_GPU, {"CPU": 1.0}], [0, 1], "bundle 1 has no GPU; leave it out of bundles"),
        ([{"GPU": 8.0}], None, r"bundle 0 has 8 GPUs; .* one GPU each, such as \[{.*}\] \* 8"),
        ([{"GPU": 0.5}] * 4, None, "bundle 0 has 0.5 GPUs"),
        ([ONE_GPU] * 4, [3], "need 2 bundles with a GPU, bundles names 1: 3"),
        ([ONE_GPU, {"CPU": 9.0}], None, "need 2 bundles with a GPU, the placement group has 1: 0"),
        ([{"CPU": 9.0}], None, "need 2 bundles with a GPU, the placement group has 0: none"),
    ],
)
def test_a_bundle_of_an_existing_group_that_does_not_fit_is_named(
    resources: list[Mapping[str, float]], named: list[int] | None, said: str
) -> None:
    plan = plan_placement({"policy": {"main": group(2, gpus=1)}})
    with pytest.raises(PlacementError, match=said):
        bundles_of_group(plan, dict(enumerate(resources)), named)


def test_by_default_all_bundles_with_a_gpu_are_used_and_the_first_in_order_get_engines() -> None:
    plan = plan_placement({"policy": {"main": group(2, gpus=1)}})
    resources = dict(enumerate([{"CPU": 4.0}, ONE_GPU, ONE_GPU, ONE_GPU]))
    assert bundles_of_group(plan, resources) == [1, 2, 3]
    granted = [Bundle(1, "b", (0,)), Bundle(2, "a", (1,)), Bundle(3, "a", (0,))]
    slots = assign_slots(plan, granted)["policy", "main"]
    assert [slot.bundle_indices for slot in slots] == [(3,), (2,)]


def test_a_cpu_engine_takes_a_bundle_without_a_gpu_and_with_its_cores() -> None:
    plan = plan_placement({"policy": {"gpu": group(gpus=1), "cpu": group(2, cpus=2)}})
    resources = dict(enumerate([{"CPU": 1.0}, {"CPU": 2.0}, ONE_GPU, {"CPU": 8.0}]))
    assert bundles_of_group(plan, resources) == [2, 1, 3]
    with pytest.raises(PlacementError, match="without a GPU and with 2 CPUs, bundles names none"):
        bundles_of_group(plan, resources, [0, 1, 2])
