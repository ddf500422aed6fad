"""What Ray knows of its nodes, and where the bundles of the run are now.

Always true: a question has a deadline or is a look into Ray's tables, made in a thread; a node is
called lost only when Ray says so (a crashed one after a dozen seconds, by the health checks of the
cluster), never because a call to it failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from engines.identity import end, resident_bytes
from engines.protocol import ProcessIdentity
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rollout.actors.calls import RemoteCall
from rollout.errors import EngineFailure, PlacementError
from rollout.types import NodeShare

LOOPBACK = "127.0.0.1"
_LOOK_S = 0.25


async def addresses() -> dict[str, str]:
    """Node id -> address, of the nodes that live."""
    nodes = await asyncio.to_thread(ray.nodes)
    return {str(one["NodeID"]): str(one["NodeManagerAddress"]) for one in nodes if one["Alive"]}


async def where_now(
    engine_id: str, group: Any, share: NodeShare, share_of_bundle: float, timeout_s: float
) -> NodeShare:
    """The same part of an engine, where its bundles are now.

    Ray gives the bundles of a lost node another place as soon as there is one.

    Raises:
        PlacementError: its node is lost, and there is no other place for it yet.
    """
    table, alive = await asyncio.gather(
        asyncio.to_thread(placement_group_table, group), addresses()
    )
    of_bundle: dict[int, str] = table["bundles_to_node_id"]
    nodes = {of_bundle.get(index, "") for index in share.bundle_indices}
    if nodes == {share.node_id} and share.node_id in alive:
        return share
    if not nodes <= alive.keys():
        raise PlacementError(
            f"engine {engine_id}: its node {share.node_id} is lost, and the cluster has no other "
            f"place for its {len(share.bundle_indices)} bundles; add a node like it, or go on "
            "without"
        )
    if len(nodes) > 1:
        raise PlacementError(
            f"engine {engine_id}: its node {share.node_id} is lost, and its bundles are now on "
            f"{', '.join(sorted(nodes))}; it needs them on one"
        )
    gpu_ids: list[int] = []
    if share.gpu_ids:
        async with asyncio.timeout(timeout_s):
            for index in share.bundle_indices:
                gpu_ids += await _gpu_ids_of(engine_id, group, index, share_of_bundle)
    return NodeShare(nodes.pop(), share.bundle_indices, tuple(gpu_ids))


def _gpu_ids_of(engine_id: str, group: Any, index: int, share: float) -> RemoteCall[list[int]]:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    look = ray.remote(num_cpus=0, num_gpus=share)(visible_gpu_ids)
    return RemoteCall(look.options(scheduling_strategy=strategy).remote(), f"node of {engine_id}")


def visible_gpu_ids() -> list[int]:
    """The GPUs of whoever asks, as the node numbers them."""
    return [int(gpu_id) for gpu_id in ray.get_gpu_ids()]


async def confirm_ended(
    engine_id: str, node_id: str, processes: Sequence[ProcessIdentity], timeout_s: float
) -> None:
    """Make sure that an engine whose actor is lost has ended, and that its memory is free.

    A task on its node kills what is left of it, by identity, and measures.  What a lost node
    held, nobody can use before it is started again; it counts as free.

    Raises:
        EngineFailure: within the deadline neither was it seen nor its node called lost.
    """
    if not processes:
        return
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(end_all).options(scheduling_strategy=strategy)
    said = "no answer from it"
    try:
        async with asyncio.timeout(timeout_s):
            asked = asyncio.ensure_future(_ask(task.remote(list(processes), timeout_s), node_id))
            try:
                while node_id in await addresses():
                    if asked.done():
                        if (held := asked.result()) == 0:
                            return
                        said = f"it still holds {held} bytes"
                        break
                    await asyncio.wait([asked], timeout=_LOOK_S)
                else:
                    return
            finally:
                asked.cancel()
    except TimeoutError:
        pass
    except Exception as error:
        if node_id not in await addresses():
            return
        said = str(error)
    raise EngineFailure(
        f"engine {engine_id} has lost its actor, and it is not known whether its memory on node "
        f"{node_id} is free: {said}",
        engine_id=engine_id,
        operation="kill",
    )


async def _ask(object_ref: Any, node_id: str) -> int:
    return await RemoteCall[int](object_ref, f"node {node_id}")


def end_all(processes: list[ProcessIdentity], timeout_s: float) -> int:
    """On the node of the engine: end it; the bytes that it holds after that."""
    for one in processes:
        end(one, timeout_s)
    return resident_bytes(processes)
