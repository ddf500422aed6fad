"""A placement group that exists before the launch: the engines and the trainer share it.

Also the launch's own group, of which the trainer's actors take whole GPUs.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rollout
from engines.fake.http_fake import HttpFakeLauncher
from engines.protocol import GpuId
from rollout.core.errors import ConfigError, PlacementError
from rollout.core.types import EngineStatus, NodeShare, TrainerSlot
from rollout.runtime.handle import DeploymentHandle
from tests.support.builders import push
from tests.support.kinds import chaos_for
from tests.support.pages import run_code
from tests.support.processes import wait_until
from tests.support.ray_worlds import NUM_GPUS, RayWorld, World, stub_world
from tests.support.served_fakes import TIMEOUT_S, config

TWO_ENGINES = {"main": {"num_engines": 2, "engine": {"gpus": 1}}}
ONE_GPU = {"GPU": 1, "CPU": 1}
HEALTH = {
    "probe_interval_s": 0.2,
    "probe_timeout_s": 1.0,
    "probes_to_dead": 2,
    "backoff_s": 0.1,
    "max_backoff_s": 1.0,
    # A node takes longer to join than five attempts to find room.
    "max_restarts": 100,
}


class Rank:
    """One rank of a trainer."""

    def gpu_ids(self) -> list[Any]:
        return list(importlib.import_module("ray").get_gpu_ids())


def start_rank(world: World, group: Any, index: int) -> Any:
    """A rank in this bundle, which takes all of it, as most trainers do."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    place = strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    options = {"num_cpus": 1, "num_gpus": 1, "scheduling_strategy": place}
    return world.ray.remote(Rank).options(**options).remote()


def gpu_ids_of(world: World, ranks: Sequence[Any]) -> list[list[GpuId]]:
    ids: list[list[GpuId]] = world.ray.get([one.gpu_ids.remote() for one in ranks], timeout=60)
    return ids


@contextmanager
def group_of(world: World, *bundles: dict[str, float]) -> Iterator[Any]:
    group = world.ray.util.placement_group(list(bundles), strategy="PACK")
    try:
        yield group
    finally:
        world.ray.util.remove_placement_group(group)
        gpus = world.ray.cluster_resources()["GPU"]
        wait_until(lambda: world.ray.available_resources().get("GPU") == gpus, TIMEOUT_S)


@contextmanager
def launched_in(
    world: World,
    folder: Path,
    group: Any = None,
    bundles: Any = None,
    groups: Any = TWO_ENGINES,
    **more: Any,
) -> Iterator[DeploymentHandle]:
    handle = world.load("launch").launch_ray(
        config(folder, groups, **more),
        launcher=HttpFakeLauncher(),
        placement_group=group,
        bundles=bundles,
    )
    try:
        yield handle
    finally:
        handle.stop()


def engines_of(handle: DeploymentHandle) -> dict[str, EngineStatus]:
    groups = handle["policy"].status().result(TIMEOUT_S).groups
    return {engine.engine_id: engine for group in groups for engine in group.engines}


def check_slots(
    world: World, handle: DeploymentHandle, slots: Sequence[TrainerSlot], ranks: Sequence[Any]
) -> None:
    """Each rank has the GPU of its slot, and the engine of its slot too."""
    assert gpu_ids_of(world, ranks) == [[slot.gpu_id] for slot in slots]
    engines = engines_of(handle)
    for slot in slots:
        (engine,) = slot.engines
        assert engines[engine.engine_id].node_id == slot.node_id
        assert engines[engine.engine_id].gpus[engine.tp_rank].uuid == f"GPU-{slot.gpu_id}"


def test_a_trainer_takes_the_whole_bundle_of_each_slot_while_the_engines_live(
    world: World, tmp_path: Path
) -> None:
    groups = {
        "apart": {"needs_offload": False, "engine": {"gpus": 1}},
        "main": {"num_engines": 1, "engine": {"kind": "sglang", "gpus": 2}},
    }
    with launched_in(world, tmp_path, groups=groups, run_id="whole") as handle:
        slots = handle.trainer_slots
        assert [slot.rank for slot in slots] == [0, 1]
        ranks = [start_rank(world, handle.placement_group, slot.bundle_index) for slot in slots]
        check_slots(world, handle, slots, ranks)
        policy = handle["policy"]
        policy.offload().result(TIMEOUT_S)
        assert policy.push(push(1)).result(TIMEOUT_S).weight_version == 1
        for rank in ranks:
            world.ray.kill(rank)


def test_engines_run_in_the_bundles_named_and_their_end_leaves_the_group(
    world: World, tmp_path: Path
) -> None:
    with group_of(world, *[ONE_GPU] * NUM_GPUS) as group:
        with launched_in(world, tmp_path, group, [3, 1], run_id="named") as handle:
            assert handle.placement_group is group
            slots = handle.trainer_slots
            assert sorted(slot.bundle_index for slot in slots) == [1, 3]
            ranks = [start_rank(world, group, slot.bundle_index) for slot in slots]
            check_slots(world, handle, slots, ranks)
        assert wait_until(lambda: world.live_actors() == ["Rank", "Rank"], TIMEOUT_S)
        assert gpu_ids_of(world, ranks) == [[slot.gpu_id] for slot in slots]
        # Another launch in the same group, which still exists.
        with launched_in(world, tmp_path, [group], [0, 2], run_id="again") as handle:
            assert sorted(slot.bundle_index for slot in handle.trainer_slots) == [0, 2]


class TrainerRank:
    """One rank of the page's trainer, which takes the whole GPU of its bundle."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gpu_id(self) -> Any:
        return importlib.import_module("ray").get_gpu_ids()[0]


def test_the_code_of_the_page_on_shared_gpus(stub: World, tmp_path: Path) -> None:
    class Library:
        """``rollout``, with fake engines."""

        def launch(self, *args: Any, **kwargs: Any) -> DeploymentHandle:
            assert kwargs.pop("backend") == "ray"
            launch = stub.load("launch").launch_ray
            handle: DeploymentHandle = launch(*args, launcher=HttpFakeLauncher(), **kwargs)
            return handle

    page = "how-to/colocated.md"
    four = {"main": {"num_engines": NUM_GPUS, "engine": {"gpus": 1}}}
    settings = config(tmp_path, four, run_id="page")
    with group_of(stub, *[ONE_GPU] * NUM_GPUS) as group:
        names = {"rollout": Library(), "config": settings, "group": group}
        deployment = run_code(page, number=3, **names)["deployment"]
        actor = stub.ray.remote(TrainerRank)
        ranks = run_code(page, number=1, TrainerRank=actor, deployment=deployment)["ranks"]
        slots = deployment.trainer_slots
        held = stub.ray.get([rank.gpu_id.remote() for rank in ranks], timeout=60)
        assert held == [slot.gpu_id for slot in slots]
        deployment.stop()
        # In the order of the bundles, and each still holds its whole GPU.
        by_bundle = [ranks[slot.rank] for slot in sorted(slots, key=lambda one: one.bundle_index)]
        made = run_code(page, number=4, ray=stub.ray, ranks=by_bundle, **names)
        found = {slot.bundle_index: slot.gpu_id for slot in made["deployment"].trainer_slots}
        assert found == made["bundles"]
        made["deployment"].stop()


@chaos_for("ray")
def test_by_default_all_bundles_with_a_gpu_are_used(world: World, tmp_path: Path) -> None:
    with (
        group_of(world, {"CPU": 1}, ONE_GPU, ONE_GPU) as group,
        launched_in(world, tmp_path, group, run_id="all") as handle,
    ):
        assert sorted(slot.bundle_index for slot in handle.trainer_slots) == [1, 2]
        assert len(engines_of(handle)) == 2


@pytest.mark.ray
@pytest.mark.slow
def test_gpus_that_a_trainer_holds_already_are_named_or_refused_in_words(
    ray_cluster: RayWorld, tmp_path: Path
) -> None:
    world = ray_cluster
    with group_of(world, *[ONE_GPU] * 2) as group:
        ranks = [start_rank(world, group, index) for index in range(2)]
        (first,), (second,) = gpu_ids_of(world, ranks)
        limit = {"placement_timeout_s": 2}
        with (
            pytest.raises(PlacementError, match=r"GPU ids of bundles 0, 1; if actors hold .*index"),
            launched_in(world, tmp_path, group, run_id="held", cluster=limit),
        ):
            pass
        assert world.live_actors() == ["Rank", "Rank"]
        bundles = {0: first, 1: str(second)}
        with launched_in(world, tmp_path, group, bundles, run_id="told") as handle:
            in_order = [ranks[slot.bundle_index] for slot in handle.trainer_slots]
            check_slots(world, handle, handle.trainer_slots, in_order)
        assert gpu_ids_of(world, ranks) == [[first], [second]]


@pytest.mark.parametrize("seed", range(5))
def test_each_slot_names_the_gpu_of_its_engine_however_bundles_were_granted(
    tmp_path: Path, seed: int
) -> None:
    groups = {
        "apart": {"needs_offload": False, "engine": {"kind": "sglang", "gpus": 2}},
        "main": {"num_engines": 2, "engine": {"kind": "sglang", "gpus": 2}},
    }
    nodes = ({"CPU": 8, "GPU": 2},) * 3
    with stub_world(nodes, seed) as world, launched_in(world, tmp_path, groups=groups) as handle:
        slots = handle.trainer_slots
        ranks = [start_rank(world, handle.placement_group, slot.bundle_index) for slot in slots]
        assert len(slots) == 4
        check_slots(world, handle, slots, ranks)
        for rank in ranks:
            world.ray.kill(rank)


@pytest.mark.parametrize("shares", [True, pytest.param(False, marks=chaos_for("ray"))])
def test_an_engine_restarts_while_a_trainer_holds_its_whole_bundles(
    world: World, tmp_path: Path, shares: bool
) -> None:
    groups = {"main": {"needs_offload": shares, "engine": {"gpus": 1}}}
    more = {"cluster": {"trainer_gpus": 1}, "health": HEALTH, "run_id": f"crash-{shares}"}
    with (
        group_of(world, ONE_GPU, ONE_GPU) as group,
        launched_in(world, tmp_path, group, groups=groups, **more) as handle,
    ):
        (slot,) = handle.trainer_slots
        assert bool(slot.engines) is shares
        rank = start_rank(world, group, slot.bundle_index)
        assert gpu_ids_of(world, [rank]) == [[slot.gpu_id]]
        before = engines_of(handle)["main-0"].endpoint
        world.crash_newest("EngineActor")
        assert wait_until(lambda: engines_of(handle)["main-0"].endpoint != before, 2 * TIMEOUT_S)
        assert not engines_of(handle)["main-0"].fence_reason
        assert gpu_ids_of(world, [rank]) == [[slot.gpu_id]]


def test_engines_of_a_lost_node_come_back_in_the_same_group(world: World, tmp_path: Path) -> None:
    # Each node has room for one bundle.
    bundle, node = {"GPU": 1, "CPU": 9}, {"CPU": 10, "GPU": 1}
    groups = {"main": {"num_engines": 2, "min_engines": 1, "engine": {"gpus": 1}}}
    with world.more_nodes(1, **node) as (added,), group_of(world, bundle, bundle) as group:
        with launched_in(
            world, tmp_path, group, groups=groups, run_id="moved", health=HEALTH
        ) as handle:
            lost = next(one for one in engines_of(handle).values() if one.node_id == added)
            world.lose_node(added)
            assert wait_until(
                lambda: "has no room" in engines_of(handle)[lost.engine_id].fence_reason, 90
            )
            replacement = world.add_node(**node)
            assert wait_until(lambda: engines_of(handle)[lost.engine_id].node_id == replacement, 90)
        assert world.ray.util.placement_group_table(group)["state"] == "CREATED"


def test_a_group_that_is_not_granted_in_time_is_named(world: World, tmp_path: Path) -> None:
    limit = {"placement_timeout_s": 1}
    with (
        group_of(world, *[ONE_GPU] * (NUM_GPUS + 1)) as group,
        pytest.raises(PlacementError, match=r"was not granted within 1 s .* free now: 4 GPUs"),
        launched_in(world, tmp_path, group, run_id="pending", cluster=limit),
    ):
        pass
    assert world.live_actors() == []


def test_a_group_that_was_removed_is_refused(world: World, tmp_path: Path) -> None:
    with group_of(world, ONE_GPU, ONE_GPU) as group:
        pass
    with (
        pytest.raises(PlacementError, match=r"placement group \w+ was removed"),
        launched_in(world, tmp_path, group, run_id="removed"),
    ):
        pass


@pytest.mark.parametrize(
    ("bundles", "said"),
    [
        ([0, 7], "bundles names 7, and the placement group has 2 bundles: 0 to 1"),
        ([1], "need 2 bundles with a GPU, bundles names 1: 1"),
        ({0: 3, 1: "3"}, "bundles 0 and 1 both have GPU 3 of node"),
    ],
)
def test_bundles_that_do_not_fit_are_refused_and_the_group_stays(
    stub: World, tmp_path: Path, bundles: Any, said: str
) -> None:
    with group_of(stub, ONE_GPU, ONE_GPU) as group:
        with pytest.raises(PlacementError, match=said), launched_in(stub, tmp_path, group, bundles):
            pass
        assert stub.ray.util.placement_group_table(group)["state"] == "CREATED"
        assert stub.live_actors() == []


@pytest.mark.parametrize(
    ("bundles", "kind", "said"),
    [
        ("01", TypeError, "a list of bundle indices, or a mapping from them to GPU ids, not '01'"),
        (1, TypeError, "not 1"),
        ([True], TypeError, "not "),
        (["0"], TypeError, "not "),
        ([], ValueError, "bundles is empty; leave it out"),
        ({0: "cuda:0"}, ValueError, "bundles: GPU id 'cuda:0'"),
    ],
)
def test_bundles_of_another_kind_are_refused(
    stub: World, tmp_path: Path, bundles: Any, kind: type[Exception], said: str
) -> None:
    with (
        group_of(stub, ONE_GPU) as group,
        pytest.raises(kind, match=said),
        launched_in(stub, tmp_path, group, bundles),
    ):
        pass


def test_what_is_no_placement_group_is_refused(stub: World, tmp_path: Path) -> None:
    whole = config(tmp_path, TWO_ENGINES)
    for wrong, kind in ((ONE_GPU, "dict"), ([ONE_GPU], "dict"), ([], "list")):
        with pytest.raises(TypeError, match=f"is a Ray PlacementGroup, not a {kind}"):
            rollout.launch(whole, backend="ray", placement_group=wrong)
    with pytest.raises(ValueError, match=r"names 2 groups, and a run has one, .* make one over"):
        rollout.launch(whole, backend="ray", placement_group=[ONE_GPU, ONE_GPU])
    with pytest.raises(ValueError, match="bundles are of a placement_group, and none is given"):
        rollout.launch(whole, backend="ray", bundles=[0])


def test_a_group_without_its_cluster_is_refused(tmp_path: Path) -> None:
    with stub_world() as world:
        group = world.ray.util.placement_group([ONE_GPU])
        world.ray.shutdown()
        with (
            pytest.raises(ConfigError, match="has not joined the Ray cluster"),
            launched_in(world, tmp_path, group),
        ):
            pass


async def test_engines_of_a_group_that_was_removed_say_so(stub: World) -> None:
    nodes = stub.load("nodes")
    with group_of(stub, ONE_GPU) as group:
        pass
    share = NodeShare(stub.nodes()[0], (0,), (0,))
    with pytest.raises(PlacementError, match=r"main-0: its placement group .* was removed; launch"):
        await nodes.current_share("main-0", group, share, timeout_s=1)


@pytest.fixture
def stub() -> Iterator[World]:
    with stub_world() as world:
        yield world
