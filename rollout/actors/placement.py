"""The placement group of a run: asked for with a deadline, then looked at to see where it is."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.actors.nodes import visible_gpu_ids
from rollout.errors import PlacementError
from rollout.placement import Bundle, Plan, check_capacity


def reserve(plan: Plan, *, timeout_s: float) -> tuple[PlacementGroup | None, list[Bundle]]:
    """Reserve ``plan`` on the cluster; a plan of attached engines alone needs nothing.

    Raises:
        PlacementError: it can never be granted, or was not within ``timeout_s``.  An
            over-subscribed placement group would otherwise be pending silently for ever.
    """
    if not plan.bundles:
        return None, []
    check_capacity(plan, ray.cluster_resources(), "the cluster")
    group = placement_group([one.resources() for one in plan.bundles], strategy="PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise PlacementError(
            f"the cluster did not grant {_told(plan.totals())} within {timeout_s:g} s; "
            f"free now: {_told(ray.available_resources())}",
            requested=plan.totals(),
            available=ray.available_resources(),
        )
    try:
        return group, _locate(plan, group, timeout_s)
    except BaseException as error:
        remove_placement_group(group)
        if isinstance(error, GetTimeoutError):
            raise PlacementError(
                f"{_told(plan.totals())} were granted, but no worker started there within "
                f"{timeout_s:g} s to say which GPUs they are",
                requested=plan.totals(),
            ) from None
        raise


def _locate(plan: Plan, group: PlacementGroup, timeout_s: float) -> list[Bundle]:
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    asked = {
        index: _gpu_ids_of(group, index)
        for index, request in enumerate(plan.bundles)
        if request.num_gpus
    }
    gpu_ids = dict(zip(asked, ray.get(list(asked.values()), timeout=timeout_s), strict=True))
    return [
        Bundle(index, nodes[index], tuple(gpu_ids.get(index, ())))
        for index in range(len(plan.bundles))
    ]


def _gpu_ids_of(group: PlacementGroup, index: int) -> Any:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    look = ray.remote(num_cpus=0, num_gpus=1)(visible_gpu_ids)
    return look.options(scheduling_strategy=strategy).remote()


def _told(resources: dict[str, float]) -> str:
    named = {name: resources[name] for name in ("GPU", "CPU") if resources.get(name)}
    return ", ".join(f"{amount:g} {name}s" for name, amount in named.items()) or "nothing"
