"""The nodes of the Ray cluster, and the current nodes of the run's bundles.

Always true: a call to a node has a deadline; Ray's tables are read in a thread.  A node counts as
lost only if Ray reports it (a crashed one after about 12 s, by the cluster's health checks), never
because a call to it failed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from engines.process.background import start_task
from engines.process.engine_records import end_and_clear
from engines.process.process_identity import resident_bytes
from engines.protocol import GpuId, ProcessIdentity, read_gpu_id
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rollout.core.errors import EngineFailure, PlacementError
from rollout.core.types import NodeShare
from rollout.runtime.ray.remote_call import RemoteCall

LOOPBACK = "127.0.0.1"
_POLL_S = 0.25
# Ray counts shares of a GPU in steps of this.
_LEAST_SHARE = 0.0001


def read_addresses() -> dict[str, str]:
    """Node id -> address, of the live nodes.  Blocks."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in nodes}


def why_not_joined(error: Exception) -> str:
    """Why ``ray.init`` failed, and what to set if this process may have sent no token."""
    token = Path.home() / ".ray" / "auth_token"
    if os.environ.get("RAY_AUTH_MODE") == "token" or not token.exists():
        return str(error)
    return (
        f"{error}; there is a token in {token}, and a cluster that was started with it refuses "
        "calls without it: set RAY_AUTH_MODE=token"
    )


def has_started_cluster() -> bool:
    """Whether this process has started the cluster that it is in, which then ends with it."""
    return any(child.name() == "gcs_server" for child in psutil.Process().children())


async def node_addresses() -> dict[str, str]:
    """Node id -> address, of the live nodes."""
    return await asyncio.to_thread(read_addresses)


def engine_host(node_id: str, addresses: Mapping[str, str]) -> str:
    """Where an engine's part on a node listens: loopback if the cluster has only one host.

    Args:
        addresses: of all nodes, see ``read_addresses``.
    """
    return addresses[node_id] if len(set(addresses.values())) > 1 else LOOPBACK


async def current_share(
    engine_id: str, group: Any, share: NodeShare, timeout_s: float
) -> NodeShare:
    """The same part of an engine, on the current node of its bundles.

    Ray moves the bundles of a lost node to another node as soon as one has room.

    Raises:
        PlacementError: its node is lost, and no other node has room yet, or reports its GPUs; or
            the placement group was removed.
    """
    table, alive = await asyncio.gather(
        asyncio.to_thread(placement_group_table, group), node_addresses()
    )
    of_bundle: dict[int, str] = table["bundles_to_node_id"]
    if table.get("state") == "REMOVED":
        raise PlacementError(
            f"engine {engine_id}: its placement group {group.id.hex()} was removed; launch again "
            "in another one"
        )
    nodes = {of_bundle.get(index, "") for index in share.bundle_indices}
    if nodes == {share.node_id} and share.node_id in alive:
        return share
    if not nodes <= alive.keys():
        raise PlacementError(
            f"engine {engine_id}: its node {share.node_id} is lost, and the cluster has no room "
            f"for its {len(share.bundle_indices)} bundles; add a node like it, or continue "
            "without this engine"
        )
    if len(nodes) > 1:
        raise PlacementError(
            f"engine {engine_id}: its node {share.node_id} is lost, and its bundles are now on "
            f"{', '.join(sorted(nodes))}; it needs them on one"
        )
    node_id, gpu_ids = nodes.pop(), []
    if share.gpu_ids:
        calls = [
            RemoteCall[list[GpuId]](gpu_ids_of_bundle(group, index), engine_id)
            for index in share.bundle_indices
        ]
        try:
            # All at once: each starts a worker, which takes seconds.
            async with asyncio.timeout(timeout_s):
                gpu_ids = [gpu_id for ids in await asyncio.gather(*calls) for gpu_id in ids]
        except TimeoutError:
            raise PlacementError(
                f"engine {engine_id}: its bundles moved to node {node_id}, and no worker started "
                f"there within {timeout_s:g} s to report its GPU ids; an actor that holds the "
                "whole GPU of a bundle prevents it, until it ends"
            ) from None
    return NodeShare(node_id, share.bundle_indices, tuple(gpu_ids))


def gpu_ids_of_bundle(group: Any, index: int) -> Any:
    """Start a task that reads the GPU id of a bundle; its object ref.

    Ray reports the id only to tasks and actors that take a share of the GPU.
    """
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    task = ray.remote(num_cpus=0, num_gpus=_LEAST_SHARE)(visible_gpu_ids)
    return task.options(scheduling_strategy=strategy).remote()


def visible_gpu_ids() -> list[GpuId]:
    """The GPU ids of the calling worker, as its node numbers them."""
    return [read_gpu_id(str(gpu_id)) for gpu_id in ray.get_gpu_ids()]


def on_node(node_id: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """Start a task on a node, which takes nothing of it; its object ref."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(work).options(scheduling_strategy=strategy)
    return task.remote(*arguments)


async def confirm_ended(
    engine_id: str, node_id: str, processes: Sequence[ProcessIdentity], timeout_s: float
) -> None:
    """Make sure that an engine whose actor is lost has ended, and that its memory is free.

    A task on its node kills its leftover processes, by identity, and measures.  The memory of a
    lost node counts as free: it cannot be used before the node restarts.

    Raises:
        EngineFailure: within the deadline, neither was this confirmed nor the node lost.
    """
    if not processes:
        return
    problem = "no reply from that node"
    try:
        async with asyncio.timeout(timeout_s):
            object_ref = on_node(node_id, end_all, list(processes), timeout_s)
            call = start_task(RemoteCall[int](object_ref, f"node {node_id}"), f"node:{node_id}")
            try:
                while node_id in await node_addresses():
                    if call.done():
                        if (held := call.result()) == 0:
                            return
                        problem = f"it still holds {held} bytes"
                        break
                    await asyncio.wait([call], timeout=_POLL_S)
                else:
                    return
            finally:
                call.cancel()
    except TimeoutError:
        pass
    except Exception as error:
        if node_id not in await node_addresses():
            return
        problem = str(error)
    raise EngineFailure(
        f"engine {engine_id} has lost its actor, and it is not known whether its memory on node "
        f"{node_id} is free: {problem}",
        engine_id=engine_id,
        operation="kill",
    )


def end_all(processes: list[ProcessIdentity], timeout_s: float) -> int:
    """On the node of the engine: end its processes; returns the bytes they still hold."""
    for identity in processes:
        end_and_clear(identity, timeout_s)
    return resident_bytes(processes)
