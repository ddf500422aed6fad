"""GPUs and nodes -> engine slots.

Always true: the trainer and the groups with ``needs_offload`` share the same leading bundles;
every other group has bundles of its own.  Bundles are put in order of (node id, lowest GPU id)
before they are handed out, so that neighbouring ranks share a node (nodes of a simulated cluster
share one IP address, so an order by address would interleave them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.protocol import WorkerType
from rollout.config import EngineKind, GroupConfig
from rollout.errors import PlacementError
from rollout.types import EngineSlot, NodeShare


@dataclass(frozen=True, slots=True)
class BundleRequest:
    """Resources of one placement-group bundle: one GPU with its CPU, or the CPUs of an engine."""

    num_gpus: int
    num_cpus: float

    def resources(self) -> dict[str, float]:
        """The bundle in Ray's words."""
        resources = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus)}
        return {name: amount for name, amount in resources.items() if amount}


@dataclass(frozen=True, slots=True)
class Bundle:
    """A granted bundle: its index in the placement group and where it turned out to be."""

    index: int
    node_id: str
    gpu_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask the cluster for.

    Attributes:
        bundles: the GPU bundles first (those shared with the trainer leading), then CPU ones.
        shared: number of leading bundles that the trainer shares.
        spans: (server, group, engine index) -> range of positions in the ordered bundles.
        num_cpus: the same keys -> CPU cores of that engine, on each of its nodes.
        num_nodes: the same keys -> nodes that engine spans.
    """

    bundles: tuple[BundleRequest, ...]
    shared: int
    spans: Mapping[tuple[str, str, int], range]
    num_cpus: Mapping[tuple[str, str, int], float]
    num_nodes: Mapping[tuple[str, str, int], int]

    def totals(self) -> dict[str, float]:
        """All resources together, resource -> amount."""
        totals: dict[str, float] = {}
        for bundle in self.bundles:
            for name, amount in bundle.resources().items():
                totals[name] = totals.get(name, 0.0) + amount
        return totals


def plan_placement(
    servers: Mapping[str, Mapping[str, GroupConfig]], *, trainer_gpus: int = 0
) -> Plan:
    """Bundles and spans for all groups of all servers.

    A GPU bundle holds one GPU and one CPU; an engine of ``gpus: n`` spans n of them.  A CPU
    engine has one bundle with its cores for each of its nodes; an attached one has its own place
    and needs none.
    """
    demands = [
        ((server, name, index), group)
        for server, groups in servers.items()
        for name, group in groups.items()
        if group.worker_type is not WorkerType.PLACEHOLDER or group.engine.gpus
        for index in range(group.num_engines)
    ]
    on_gpu = [one for one in demands if one[1].engine.gpus]
    colocated = [one for one in on_gpu if one[1].needs_offload]
    separate = [one for one in on_gpu if not one[1].needs_offload]
    spans: dict[tuple[str, str, int], range] = {}
    # Several offloading servers share the trainer's GPUs with one another too only when they
    # fit side by side; stacking engines on one GPU is never done silently.
    position = 0
    for key, group in colocated:
        spans[key] = range(position, position + group.engine.gpus)
        position += group.engine.gpus
    shared = max(trainer_gpus, position)
    position = shared
    for key, group in separate:
        spans[key] = range(position, position + group.engine.gpus)
        position += group.engine.gpus
    bundles = [BundleRequest(num_gpus=1, num_cpus=1.0)] * position
    for key, group in demands:
        if group.engine.kind is EngineKind.ATTACHED:
            spans[key] = range(0)
        elif not group.engine.gpus:
            spans[key] = range(len(bundles), len(bundles) + group.engine.nodes)
            bundle = BundleRequest(num_gpus=0, num_cpus=group.engine.cpus)
            bundles += [bundle] * group.engine.nodes
    cpus = {key: group.engine.cpus for key, group in demands}
    nodes = {key: group.engine.nodes for key, group in demands}
    return Plan(tuple(bundles), shared, spans, cpus, nodes)


def assign_slots(plan: Plan, granted: Sequence[Bundle]) -> dict[tuple[str, str], list[EngineSlot]]:
    """(server, group) -> its slots, from the bundles the cluster granted.

    Raises:
        PlacementError: bundles are missing, or an engine would straddle more nodes than it may.
    """
    if len(granted) != len(plan.bundles):
        raise PlacementError(
            f"placement needs {len(plan.bundles)} bundles, {len(granted)} were granted",
            requested=plan.totals(),
        )
    gpu = sorted(
        (one for one in granted if one.gpu_ids), key=lambda one: (one.node_id, one.gpu_ids)
    )
    cpu = [one for one in granted if not one.gpu_ids]
    ordered = gpu + cpu
    slots: dict[tuple[str, str], list[EngineSlot]] = {}
    for key, span in plan.spans.items():
        server, group, index = key
        mine = [ordered[position] for position in span]
        first, *more = _shares(key, mine, plan.num_nodes[key])
        slots.setdefault((server, group), []).append(
            EngineSlot(
                engine_id=f"{group}-{index}",
                group=group,
                index=index,
                node_id=first.node_id,
                bundle_indices=first.bundle_indices,
                gpu_ids=first.gpu_ids,
                num_cpus=plan.num_cpus[key],
                more=tuple(more),
            )
        )
    return slots


def _shares(
    key: tuple[str, str, int], bundles: Sequence[Bundle], num_nodes: int
) -> list[NodeShare]:
    """The bundles of one engine, divided equally and each part on one node."""
    if not bundles:
        return [NodeShare("elsewhere")]
    server, group, index = key
    per_node = len(bundles) // num_nodes
    shares = []
    for start in range(0, len(bundles), per_node):
        part = bundles[start : start + per_node]
        nodes = sorted({one.node_id for one in part})
        if len(nodes) > 1:
            raise PlacementError(
                f"engine {group}-{index} of server {server} needs {per_node} GPUs on "
                f"{'one node' if num_nodes == 1 else 'each of its nodes'}, but its bundles are on "
                f"{', '.join(nodes)}; give its group engine.nodes and gpus that fit these nodes"
            )
        gpu_ids = tuple(gpu_id for one in part for gpu_id in one.gpu_ids)
        shares.append(NodeShare(nodes[0], tuple(one.index for one in part), gpu_ids))
    return shares


def check_capacity(plan: Plan, available: Mapping[str, float], where: str) -> None:
    """Refuse a plan that can never be granted.

    Args:
        available: resource -> amount in all; a resource that is not named is none.
        where: whose resources these are, for the message.

    Raises:
        PlacementError: with what is needed and what there is.
    """
    for name, amount in plan.totals().items():
        if amount > available.get(name, 0.0):
            raise PlacementError(
                f"placement needs {amount:g} {name}s, {where} has {available.get(name, 0.0):g}",
                requested=plan.totals(),
                available=dict(available),
            )


def local_bundles(plan: Plan, gpu_ids: Sequence[int], num_cpus: float) -> list[Bundle]:
    """Grant a plan on this machine alone, without Ray.

    CPU cores are not counted here: without a cluster nobody else competes for them.

    Raises:
        PlacementError: there are fewer GPUs than the plan needs, or an engine needs two machines.
    """
    for (_, group, index), num_nodes in plan.num_nodes.items():
        if num_nodes > 1:
            raise PlacementError(
                f"engine {group}-{index} spans {num_nodes} nodes, and there is one without Ray; "
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
