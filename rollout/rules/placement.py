"""Assigns GPUs and nodes to engine slots.

Always true: the trainer and the groups with ``needs_offload`` share the first bundles; every other
group has separate bundles.  Bundles are sorted by (node id, lowest GPU id) before they are
assigned, so that neighbouring ranks share a node: their order is not that of their indices in the
placement group.  (Nodes of a simulated cluster share one IP address, so an order by address would
mix them.)  Two engines of one server are never on the same GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from engines.protocol import GpuId, WorkerType
from rollout.config import GroupConfig, RolloutConfig
from rollout.core.errors import PlacementError
from rollout.core.types import EngineRank, EngineSlot, NodeShare, TrainerSlot

ELSEWHERE = "elsewhere"
"""The node of attached engines, which a run does not know."""

EngineKey = tuple[str, str, int]


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
    """A granted bundle: its index in the placement group (None without Ray), node and GPUs."""

    index: int | None
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
        groups: the same keys -> settings of the engine's group.
    """

    bundles: tuple[BundleRequest, ...]
    shared: int
    spans: Mapping[EngineKey, range]
    groups: Mapping[EngineKey, GroupConfig]

    @property
    def num_gpus(self) -> int:
        return sum(bundle.num_gpus for bundle in self.bundles)

    def on_gpu(self, position: int) -> list[EngineKey]:
        """The engines that are started on one GPU."""
        return [
            key
            for key, span in self.spans.items()
            if position in span and self.groups[key].worker_type is not WorkerType.PLACEHOLDER
        ]

    @property
    def stacked(self) -> dict[str, list[str]]:
        """Server -> the servers before it in the configuration on the same GPUs, if it has any."""
        found: dict[str, list[str]] = {}
        for position in range(self.shared):
            servers = list(dict.fromkeys(server for server, _, _ in self.on_gpu(position)))
            for index, server in enumerate(servers[1:], 1):
                found[server] = list(dict.fromkeys([*found.get(server, []), *servers[:index]]))
        return found

    def totals(self) -> dict[str, float]:
        """The sum of all bundles, resource -> amount."""
        whole = BundleRequest(
            sum(bundle.num_gpus for bundle in self.bundles),
            sum(bundle.num_cpus for bundle in self.bundles),
        )
        return whole.resources()


def plan_of(config: RolloutConfig) -> PlacementPlan:
    """See ``plan_placement``."""
    servers = {name: server.groups for name, server in config.servers.items()}
    return plan_placement(servers, trainer_gpus=config.cluster.trainer_gpus)


def plan_placement(
    servers: Mapping[str, Mapping[str, GroupConfig]], *, trainer_gpus: int = 0
) -> PlacementPlan:
    """Bundles and spans for all groups of all servers.

    A GPU bundle has one GPU and one CPU core; an engine with ``gpus: n`` gets n of them.  A CPU
    engine gets one bundle with its cores for each of its nodes.  An attached engine gets none.

    Args:
        trainer_gpus: servers whose groups offload are stacked if together they need more; 0: each
            has GPUs of its own.
    """
    groups = {
        (server, name, index): group
        for server, groups in servers.items()
        for name, group in groups.items()
        if group.worker_type is not WorkerType.PLACEHOLDER or group.engine.gpus
        for index in range(group.num_engines)
    }
    sharing = {
        key: group.engine.gpus
        for key, group in groups.items()
        if group.engine.gpus and group.needs_offload
    }
    spans = _shared_spans(sharing, trainer_gpus)
    shared = num_gpus = max([trainer_gpus, *(span.stop for span in spans.values())])
    for key, group in groups.items():
        if group.engine.gpus and not group.needs_offload:
            spans[key] = range(num_gpus, num_gpus + group.engine.gpus)
            num_gpus += group.engine.gpus
    bundles = [BundleRequest(num_gpus=1, num_cpus=1.0)] * num_gpus
    for key, group in groups.items():
        if group.engine.is_attached:
            spans[key] = range(0)
        elif not group.engine.gpus:
            spans[key] = range(len(bundles), len(bundles) + group.engine.nodes)
            bundle = BundleRequest(num_gpus=0, num_cpus=group.engine.cpus)
            bundles += [bundle] * group.engine.nodes
    return PlacementPlan(tuple(bundles), shared, spans, groups)


def _shared_spans(sharing: Mapping[EngineKey, int], trainer_gpus: int) -> dict[EngineKey, range]:
    """Spans of the engines that share the trainer's GPUs, engine -> its GPUs.

    Each server begins after the one before it.  If it does not fit there, it begins at the first
    GPU again, and is stacked on the servers that are there.
    """
    spans: dict[EngineKey, range] = {}
    position = 0
    for _, keys in groupby(sharing, key=lambda key: key[0]):
        mine = list(keys)
        if trainer_gpus and spans:
            # A multiple of its widest engine, which could otherwise straddle two nodes.
            widest = max(sharing[key] for key in mine)
            position = -(-position // widest) * widest
            if position + sum(sharing[key] for key in mine) > trainer_gpus:
                position = 0
        for key in mine:
            spans[key] = range(position, position + sharing[key])
            position += sharing[key]
    return spans


def assign_slots(
    plan: PlacementPlan, granted: Sequence[Bundle]
) -> dict[tuple[str, str], list[EngineSlot]]:
    """(server, group) -> its slots, from the bundles the cluster granted.

    Raises:
        PlacementError: bundles are missing, or the bundles of an engine are on too many nodes.
    """
    ordered = _in_order(plan, granted)
    slots: dict[tuple[str, str], list[EngineSlot]] = {}
    for key, span in plan.spans.items():
        server, group, index = key
        mine = [ordered[position] for position in span]
        settings = plan.groups[key]
        first, *more = _shares(key, mine, settings.engine.nodes)
        slots.setdefault((server, group), []).append(
            EngineSlot(
                engine_id=f"{group}-{index}",
                group=group,
                index=index,
                node_id=first.node_id,
                bundle_indices=first.bundle_indices,
                gpu_ids=first.gpu_ids,
                num_cpus=settings.engine.cpus,
                shares_gpus=bool(first.gpu_ids) and settings.needs_offload,
                more=tuple(more),
            )
        )
    return slots


def trainer_slots(plan: PlacementPlan, granted: Sequence[Bundle]) -> tuple[TrainerSlot, ...]:
    """The trainer's GPUs in the order of its ranks, each with the engines that share it.

    Raises:
        PlacementError: bundles are missing.
    """
    return tuple(
        TrainerSlot(
            rank=rank,
            bundle_index=bundle.index,
            node_id=bundle.node_id,
            gpu_id=bundle.gpu_ids[0],
            engines=tuple(
                EngineRank(server, f"{group}-{index}", rank - plan.spans[key].start)
                for key in plan.on_gpu(rank)
                for server, group, index in [key]
            ),
        )
        for rank, bundle in enumerate(_in_order(plan, granted)[: plan.shared])
    )


def _in_order(plan: PlacementPlan, granted: Sequence[Bundle]) -> list[Bundle]:
    """The bundles for the positions of a plan; GPU bundles that it does not need are left out."""
    ordered = [bundle for bundle in sorted(granted, key=_place) if bundle.gpu_ids][: plan.num_gpus]
    ordered += [bundle for bundle in granted if not bundle.gpu_ids]
    if len(ordered) != len(plan.bundles):
        raise PlacementError(
            f"placement needs {len(plan.bundles)} bundles, {len(granted)} were granted",
            requested=plan.totals(),
        )
    return ordered


def _place(bundle: Bundle) -> tuple[str, list[tuple[bool, GpuId]]]:
    """Sorts by node and GPU.  Without Ray the GPUs keep their order, which is that of torch."""
    gpu_ids = bundle.gpu_ids if bundle.index is not None else ()
    return bundle.node_id, [(isinstance(gpu_id, str), gpu_id) for gpu_id in gpu_ids]


def _shares(
    key: tuple[str, str, int], bundles: Sequence[Bundle], num_nodes: int
) -> list[NodeShare]:
    """The bundles of one engine, divided equally over its nodes."""
    if not bundles:
        return [NodeShare(ELSEWHERE)]
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
        indices = tuple(bundle.index for bundle in part if bundle.index is not None)
        shares.append(NodeShare(nodes[0], indices, gpu_ids))
    return shares


def bundles_of_group(
    plan: PlacementPlan,
    resources: Mapping[int, Mapping[str, float]],
    named: Iterable[int] | None = None,
) -> list[int]:
    """The bundles of an existing placement group that a plan may use, by index.

    All with a GPU, also those beyond what the plan needs; and one for each CPU engine.

    Args:
        resources: the resources of all bundles of the group.
        named: the only bundles to use; None: all.

    Raises:
        PlacementError: a bundle is wrong, or there are too few; names what is missing.
    """
    chosen = sorted(resources) if named is None else list(named)
    if why_not := next(_wrong_bundles(plan, resources, chosen, is_named=named is not None), ""):
        raise PlacementError(why_not)
    with_gpu = [index for index in chosen if resources[index].get("GPU")]
    without = [index for index in chosen if index not in with_gpu]
    where = "bundles names" if named is not None else "the placement group has"
    if len(with_gpu) < plan.num_gpus:
        raise PlacementError(
            f"engines and trainer need {plan.num_gpus} bundles with a GPU, {where} "
            f"{len(with_gpu)}: {', '.join(map(str, with_gpu)) or 'none'}",
            requested=plan.totals(),
        )
    for request in plan.bundles[plan.num_gpus :]:
        fitting = [node for node in without if resources[node].get("CPU", 0) >= request.num_cpus]
        if not fitting:
            raise PlacementError(
                f"an engine on the CPU needs a bundle without a GPU and with {request.num_cpus:g} "
                f"CPUs, {where} none that is free",
                requested=plan.totals(),
            )
        without.remove(fitting[0])
        with_gpu.append(fitting[0])
    return with_gpu


def _wrong_bundles(
    plan: PlacementPlan,
    resources: Mapping[int, Mapping[str, float]],
    chosen: Sequence[int],
    *,
    is_named: bool,
) -> Iterator[str]:
    """What is wrong with the bundles of an existing placement group."""
    for place, index in enumerate(chosen):
        if index not in resources:
            yield (
                f"bundles names {index}, and the placement group has {len(resources)} bundles: "
                f"0 to {len(resources) - 1}"
            )
        elif index in chosen[:place]:
            yield f"bundles names {index} twice; name each bundle once"
        elif (num_gpus := resources[index].get("GPU", 0.0)) not in (0, 1):
            yield (
                f"bundle {index} has {num_gpus:g} GPUs; engines need bundles with one GPU each, "
                'such as [{"GPU": 1, "CPU": 1}] * 8, because Ray gives ids by bundle'
            )
        elif is_named and not num_gpus and len(plan.bundles) == plan.num_gpus:
            yield f"bundle {index} has no GPU; leave it out of bundles"


def check_distinct_gpus(bundles: Sequence[Bundle]) -> None:
    """Check that no two bundles have the same GPU, because two engines of a server would share it.

    Raises:
        PlacementError: two have; names them.
    """
    owners: dict[tuple[str, GpuId], int | None] = {}
    for bundle in bundles:
        for gpu_id in bundle.gpu_ids:
            other = owners.setdefault((bundle.node_id, gpu_id), bundle.index)
            if other != bundle.index:
                raise PlacementError(
                    f"bundles {other} and {bundle.index} both have GPU {gpu_id} of node "
                    f"{bundle.node_id}; each needs a GPU of its own"
                )


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
    for (_, group, index), settings in plan.groups.items():
        if settings.engine.nodes > 1:
            raise PlacementError(
                f"engine {group}-{index} spans {settings.engine.nodes} nodes, and without Ray "
                "there is one; launch it on a Ray cluster"
            )
    if plan.num_gpus > len(gpu_ids):
        raise PlacementError(
            f"placement needs {plan.num_gpus} GPUs, this machine has {len(gpu_ids)}",
            requested=plan.totals(),
            available={"GPU": float(len(gpu_ids)), "CPU": num_cpus},
        )
    free = iter(gpu_ids)
    return [
        Bundle(None, "local", (next(free),) if request.num_gpus else ()) for request in plan.bundles
    ]
