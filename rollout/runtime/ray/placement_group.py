"""The placement group of a run: requests it with a deadline, and locates its bundles.

Always true: a granted group is removed only when no actor or task uses it.  To remove it would kill
all actors in it, also those of the trainer, with their model and optimizer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from rollout.core.errors import PlacementError
from rollout.rules.placement import Bundle, PlacementPlan, check_capacity
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
    try:
        return group, _locate(plan, group, timeout_s)
    except BaseException as error:
        remove_placement_group(group)
        if isinstance(error, GetTimeoutError):
            raise PlacementError(
                f"{_format_resources(plan.totals())} were granted, but no worker started there "
                f"within {timeout_s:g} s to report its GPU ids",
                requested=plan.totals(),
            ) from None
        raise


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


def _locate(plan: PlacementPlan, group: PlacementGroup, timeout_s: float) -> list[Bundle]:
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    calls = {
        index: gpu_ids_of_bundle(group, index)
        for index, request in enumerate(plan.bundles)
        if request.num_gpus
    }
    gpu_ids = dict(zip(calls, ray.get(list(calls.values()), timeout=timeout_s), strict=True))
    return [
        Bundle(index, nodes[index], tuple(gpu_ids.get(index, ())))
        for index in range(len(plan.bundles))
    ]


def _format_resources(resources: dict[str, float]) -> str:
    named = {name: resources[name] for name in ("GPU", "CPU") if resources.get(name)}
    return ", ".join(f"{amount:g} {name}s" for name, amount in named.items()) or "nothing"
