"""Assigns GPUs and nodes to engine slots.

Always true: the trainer and the groups with ``needs_offload`` share the first bundles; every other
group has separate bundles.  Bundles are sorted by (node id, lowest GPU id) before they are
assigned, so that neighbouring ranks share a node.  (Nodes of a simulated cluster share one IP
address, so an order by address would mix them.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.protocol import GpuId, WorkerType
from rollout.config import EngineConfig, EngineKind, GroupConfig
from rollout.core.errors import PlacementError
from rollout.core.types import EngineSlot, NodeShare


@dataclass(frozen=True, slots=True)
class BundleRequest:
    """Resources of one placement-group bundle: one GPU with its CPU, or the CPUs of an engine."""

    num_gpus: int
    num_cpus: float

    def resources(self) -> dict[str, float]:
        """The bundle in the form that Ray takes."""
        resources = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus)}
        return {name: amount for name, amount in resources.items() if amount}


@dataclass(frozen=True, slots=True)
class Bundle:
    """A granted bundle: its index in the placement group, its node and its GPUs."""

    index: int
    node_id: str
    gpu_ids: tuple[GpuId, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The resources to request from the cluster.

    Attributes:
        bundles: first the GPU bundles shared with the trainer, then other GPU bundles, then CPU
            bundles.
        shared: number of bundles shared with the trainer.
        spans: (server, group, engine index) -> range of positions in the sorted bundles.
        engines: the same keys -> settings of the engine.
    """

    bundles: tuple[BundleRequest, ...]
    shared: int
    spans: Mapping[tuple[str, str, int], range]
    engines: Mapping[tuple[str, str, int], EngineConfig]

    def totals(self) -> dict[str, float]:
        """The sum of all bundles, resource -> amount."""
        whole = BundleRequest(
            sum(bundle.num_gpus for bundle in self.bundles),
            sum(bundle.num_cpus for bundle in self.bundles),
        )
        return whole.resources()


def plan_placement(
    servers: Mapping[str, Mapping[str, GroupConfig]], *, trainer_gpus: int = 0
) -> PlacementPlan:
    """Bundles and spans for all groups of all servers.

    A GPU bundle has one GPU and one CPU core; an engine with ``gpus: n`` gets n of them.  A CPU
    engine gets one bundle with its cores for each of its nodes.  An attached engine gets none.
    """
    demands = [
        ((server, name, index), group)
        for server, groups in servers.items()
        for name, group in groups.items()
        if group.worker_type is not WorkerType.PLACEHOLDER or group.engine.gpus
        for index in range(group.num_engines)
    ]
    spans: dict[tuple[str, str, int], range] = {}

    def place(position: int, *, is_colocated: bool) -> int:
        """Give GPU engines their spans from ``position`` on; returns the end of the last one."""
        for key, group in demands:
            if group.engine.gpus and group.needs_offload is is_colocated:
                spans[key] = range(position, position + group.engine.gpus)
                position += group.engine.gpus
        return position

    # Several offloading servers share the trainer's GPUs side by side: two engines are never put on
    # the same GPU.
    shared = max(trainer_gpus, place(0, is_colocated=True))
    num_gpus = place(shared, is_colocated=False)
    bundles = [BundleRequest(num_gpus=1, num_cpus=1.0)] * num_gpus
    for key, group in demands:
        if group.engine.kind is EngineKind.ATTACHED:
            spans[key] = range(0)
        elif not group.engine.gpus:
            spans[key] = range(len(bundles), len(bundles) + group.engine.nodes)
            bundle = BundleRequest(num_gpus=0, num_cpus=group.engine.cpus)
            bundles += [bundle] * group.engine.nodes
    engines = {key: group.engine for key, group in demands}
    return PlacementPlan(tuple(bundles), shared, spans, engines)


def assign_slots(
    plan: PlacementPlan, granted: Sequence[Bundle]
) -> dict[tuple[str, str], list[EngineSlot]]:
    """(server, group) -> its slots, from the bundles the cluster granted.

    Raises:
        PlacementError: bundles are missing, or the bundles of an engine are on too many nodes.
    """
    if len(granted) != len(plan.bundles):
        raise PlacementError(
            f"placement needs {len(plan.bundles)} bundles, {len(granted)} were granted",
            requested=plan.totals(),
        )
    by_place = sorted(granted, key=lambda bundle: (bundle.node_id, bundle.gpu_ids))
    ordered = [bundle for bundle in by_place if bundle.gpu_ids]
    ordered += [bundle for bundle in granted if not bundle.gpu_ids]
    slots: dict[tuple[str, str], list[EngineSlot]] = {}
    for key, span in plan.spans.items():
        server, group, index = key
        mine = [ordered[position] for position in span]
        first, *more = _shares(key, mine, plan.engines[key].nodes)
        slots.setdefault((server, group), []).append(
            EngineSlot(
                engine_id=f"{group}-{index}",
                group=group,
                index=index,
                node_id=first.node_id,
                bundle_indices=first.bundle_indices,
                gpu_ids=first.gpu_ids,
                num_cpus=plan.engines[key].cpus,
                more=tuple(more),
            )
        )
    return slots


def _shares(
    key: tuple[str, str, int], bundles: Sequence[Bundle], num_nodes: int
) -> list[NodeShare]:
    """The bundles of one engine, divided equally over its nodes."""
    if not bundles:
        return [NodeShare("elsewhere")]
    server, group, index = key
    per_node = len(bundles) // num_nodes
    shares = []
    for start in range(0, len(bundles), per_node):
        part = bundles[start : start + per_node]
        nodes = sorted({bundle.node_id for bundle in part})
        if len(nodes) > 1:
            raise PlacementError(
                f"engine {group}-{index} of server {server} needs {per_node} GPUs on "
                f"{'one node' if num_nodes == 1 else 'each of its nodes'}, but its bundles are on "
                f"{', '.join(nodes)}; give its group engine.nodes and gpus that fit these nodes"
            )
        gpu_ids = tuple(gpu_id for bundle in part for gpu_id in bundle.gpu_ids)
        shares.append(NodeShare(nodes[0], tuple(bundle.index for bundle in part), gpu_ids))
    return shares


def check_capacity(plan: PlacementPlan, available: Mapping[str, float], where: str) -> None:
    """Check that a plan can be granted at all.

    Args:
        available: resource -> total amount; 0 for a resource that is missing.
        where: name of the cluster or machine, for the message.

    Raises:
        PlacementError: it cannot; has the needed and the available amount.
    """
    for name, amount in plan.totals().items():
        if amount > available.get(name, 0.0):
            raise PlacementError(
                f"placement needs {amount:g} {name}s, {where} has {available.get(name, 0.0):g}",
                requested=plan.totals(),
                available=dict(available),
            )


def local_bundles(plan: PlacementPlan, gpu_ids: Sequence[GpuId], num_cpus: float) -> list[Bundle]:
    """Grant a plan on this machine alone, without Ray.

    CPU cores are not counted: without a cluster there is no other user of them.

    Raises:
        PlacementError: there are fewer GPUs than the plan needs, or an engine needs two machines.
    """
    for (_, group, index), engine in plan.engines.items():
        if engine.nodes > 1:
            raise PlacementError(
                f"engine {group}-{index} spans {engine.nodes} nodes, and without Ray there is one; "
                "launch it on a Ray cluster"
            )
    needed = sum(request.num_gpus for request in plan.bundles)
    if needed > len(gpu_ids):
        raise PlacementError(
            f"placement needs {needed} GPUs, this machine has {len(gpu_ids)}",
            requested=plan.totals(),
            available={"GPU": float(len(gpu_ids)), "CPU": num_cpus},
        )
    free = iter(gpu_ids)
    return [
        Bundle(index, "local", (next(free),) if request.num_gpus else ())
        for index, request in enumerate(plan.bundles)
    ]
