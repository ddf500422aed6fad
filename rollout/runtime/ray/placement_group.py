"""The placement group of a run: requests it with a deadline, and locates its bundles.

Always true: a granted group is removed only when no actor or task uses it.  To remove it would kill
all actors in it, also those of the trainer, with their model and optimizer.  An existing group that
was handed in is never removed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from engines.protocol import GpuId, read_gpu_id
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from rollout.core.errors import ConfigError, PlacementError
from rollout.rules.placement import (
    Bundle,
    PlacementPlan,
    bundles_of_group,
    check_capacity,
    check_distinct_gpus,
)
from rollout.runtime.ray.nodes import gpu_ids_of_bundle

logger = logging.getLogger(__name__)

_POLL_S = 0.1
# Shares of resources are sums of floats; Ray counts in steps of 0.0001.
_ROUNDING = 0.00005


def reserve(plan: PlacementPlan, *, timeout_s: float) -> tuple[PlacementGroup | None, list[Bundle]]:
    """Reserve ``plan`` on the cluster; a plan with only attached engines needs nothing.

    Raises:
        PlacementError: the cluster is too small, or did not grant it within ``timeout_s``.
            Without the deadline, an over-subscribed placement group would wait for ever.
    """
    if not plan.bundles:
        return None, []
    check_capacity(plan, ray.cluster_resources(), "the cluster")
    group = placement_group([bundle.resources() for bundle in plan.bundles], strategy="PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise PlacementError(
            f"the cluster did not grant {_format_resources(plan.totals())} within {timeout_s:g} s; "
            f"free now: {_format_resources(ray.available_resources())}",
            requested=plan.totals(),
            available=ray.available_resources(),
        )
    gpus = [index for index, request in enumerate(plan.bundles) if request.num_gpus]
    try:
        return group, _locate(
            group, range(len(plan.bundles)), _read_gpu_ids(group, gpus, timeout_s)
        )
    except BaseException:
        remove_placement_group(group)
        raise


@dataclass(frozen=True, slots=True)
class ExistingGroup:
    """A placement group that somebody else has made, and ends.

    Attributes:
        named: the only bundles to use; None: all with a GPU.
        gpu_ids: GPU ids by bundle, of bundles whose whole GPU is taken already.
    """

    group: PlacementGroup
    named: tuple[int, ...] | None
    gpu_ids: Mapping[int, GpuId]

    @classmethod
    def of(cls, group: Any, bundles: Any) -> ExistingGroup | None:
        """The group of these arguments of ``rollout.launch``, or None if there is none.

        Raises:
            TypeError, ValueError: they are of a wrong kind.
            ConfigError: Ray is not connected.
        """
        if group is None:
            if bundles is not None:
                raise ValueError("bundles are of a placement_group, and none is given")
            return None
        if isinstance(group, Sequence) and len(group) > 1:
            raise ValueError(
                f"placement_group names {len(group)} groups, and a run has one, by whose indices "
                "its engines find their bundles again; make one over all nodes (strategy PACK), or "
                "one run for each group"
            )
        if isinstance(group, Sequence) and group:
            (group,) = group
        if not isinstance(group, PlacementGroup):
            raise TypeError(
                f"placement_group is a Ray PlacementGroup, not a {type(group).__name__}"
            )
        if not ray.is_initialized():
            raise ConfigError(
                "this process has not joined the Ray cluster of placement_group; call ray.init"
            )
        if bundles is None:
            return cls(group, None, {})
        _check_kind_of(bundles)
        ids = bundles if isinstance(bundles, Mapping) else {}
        return cls(group, tuple(bundles), {index: _gpu_id(ids[index]) for index in ids})

    def locate(self, plan: PlacementPlan, *, timeout_s: float) -> list[Bundle]:
        """The bundles for ``plan``, in this group.

        Raises:
            PlacementError: the group is not granted, its bundles do not fit the plan, or their
                GPU ids cannot be read.
        """
        table = placement_group_table(self.group)
        name = f"placement group {self.group.id.hex()}"
        if table.get("state") == "REMOVED":
            raise PlacementError(f"{name} was removed")
        chosen = bundles_of_group(plan, table["bundles"], self.named)
        if not self.group.wait(timeout_s):
            raise PlacementError(
                f"{name} was not granted within {timeout_s:g} s (cluster.placement_timeout_s); "
                f"free now: {_format_resources(ray.available_resources())}",
                requested=plan.totals(),
                available=ray.available_resources(),
            )
        unknown = [
            index
            for index in chosen
            if table["bundles"][index].get("GPU") and index not in self.gpu_ids
        ]
        read = _read_gpu_ids(self.group, unknown, timeout_s)
        given = {index: [gpu_id] for index, gpu_id in self.gpu_ids.items()}
        located = _locate(self.group, chosen, read | given)
        check_distinct_gpus(located)
        return located


def _check_kind_of(bundles: Any) -> None:
    is_list = isinstance(bundles, (Sequence, Mapping)) and not isinstance(bundles, (str, bytes))
    if not is_list or any(type(index) is not int for index in bundles):
        raise TypeError(
            "bundles is a list of bundle indices, or a mapping from them to GPU ids, not "
            f"{bundles!r}"
        )
    if not bundles:
        raise ValueError("bundles is empty; leave it out to use all bundles with a GPU")


def _gpu_id(gpu_id: Any) -> GpuId:
    try:
        return read_gpu_id(str(gpu_id))
    except ValueError as error:
        raise ValueError(f"bundles: {error}") from None


def remove_unused(group: PlacementGroup, *, timeout_s: float) -> bool:
    """Remove the group of a run that has ended, unless others still use it; True if it is gone.

    Args:
        timeout_s: how long actors that were killed may take to disappear.
    """
    if used := still_used(f"_group_{group.id.hex()}", timeout_s=timeout_s):
        logger.warning(
            "placement group %s stays: actors or tasks that this run did not start use %s of "
            "it; it ends with its job, or by ray.util.remove_placement_group",
            group.id.hex(),
            ", ".join(used),
        )
        return False
    remove_placement_group(group)
    return True


def used_of(group: PlacementGroup) -> list[str]:
    """The resources of a group that actors or tasks use now, by name; none of one that is gone."""
    if placement_group_table(group).get("state") == "REMOVED":
        return []
    ending = f"_group_{group.id.hex()}"
    return used_names(ray.cluster_resources(), ray.available_resources(), ending)


def still_used(ending: str = "", *, timeout_s: float) -> list[str]:
    """The cluster's resources with this ending that are in use after ``timeout_s``, by name.

    Returns as soon as there are none: Ray frees those of killed actors a moment later.
    """
    deadline_s = time.monotonic() + timeout_s
    while used := used_names(ray.cluster_resources(), ray.available_resources(), ending):
        if time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    return used


def used_names(
    total: Mapping[str, float], available: Mapping[str, float], ending: str
) -> list[str]:
    """Names with this ending of which less is available than there is."""
    return sorted(
        name
        for name, amount in total.items()
        if name.endswith(ending)
        and "memory" not in name
        and available.get(name, 0.0) < amount - _ROUNDING
    )


def _read_gpu_ids(
    group: PlacementGroup, bundles: Sequence[int], timeout_s: float
) -> dict[int, list[GpuId]]:
    calls = {index: gpu_ids_of_bundle(group, index) for index in bundles}
    refs = list(calls.values())
    _, late = ray.wait(refs, num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
    for ref in late:
        ray.cancel(ref)
    if late:
        raise PlacementError(
            f"no worker started within {timeout_s:g} s (cluster.placement_timeout_s) to report the "
            f"GPU ids of bundles {', '.join(str(at) for at in calls if calls[at] in late)}; if "
            "actors hold their whole GPUs, launch before these actors start, or launch with "
            "bundles={index: GPU id}"
        )
    return dict(zip(calls, ray.get(refs), strict=True))


def _locate(
    group: PlacementGroup, bundles: Iterable[int], gpu_ids: Mapping[int, Sequence[GpuId]]
) -> list[Bundle]:
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [Bundle(index, nodes[index], tuple(gpu_ids.get(index, ()))) for index in bundles]


def _format_resources(resources: dict[str, float]) -> str:
    named = {name: resources[name] for name in ("GPU", "CPU") if resources.get(name)}
    return ", ".join(f"{amount:g} {name}s" for name, amount in named.items()) or "nothing"
