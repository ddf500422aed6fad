"""Make the actors of a run and place them.  Nobody else sees the whole configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from engines.launch import EngineLauncher, LocalLauncher
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.actors.calls import RemoteCall, peel
from rollout.actors.handles import RayServer
from rollout.actors.launcher import EnginePlacement
from rollout.actors.parts import ServerParts
from rollout.actors.placement import reserve
from rollout.actors.shells import EngineActor, RolloutServerActor, RouterActor, ServerGroupActor
from rollout.actors.store import end_agents, place_agents
from rollout.config import RolloutConfig, ServerConfig, check_paths
from rollout.deployment import Deployment
from rollout.errors import ConfigError
from rollout.handle import DeploymentHandle, ServerHandle
from rollout.journal import Journal
from rollout.local import (
    group_settings,
    lock_timeout_s,
    started_groups,
    store_nodes,
    store_terms,
)
from rollout.pending import LoopThread, Pending
from rollout.placement import assign_slots, plan_placement
from rollout.policy import release_policy
from rollout.run_folder import JOURNAL_FILE, RunFolder
from rollout.types import EngineSlot
from rollout.weights.push import WeightPush
from rollout.weights.source import WeightSource
from rollout.weights.store.agents import RemoteAgents
from rollout.weights.store.source import StoreSource

logger = logging.getLogger(__name__)

_STOP_MARGIN_S = 45.0


class RayCaller:
    """Calls ``RayServer`` ports: a call is submitted at once and has an ObjectRef."""

    def call(self, method: Callable[..., Any], *args: Any) -> Pending[Any]:
        submitted: RemoteCall[Any] = method(*args)
        return Pending(
            submitted.object_ref.future(),
            object_ref=submitted.object_ref,
            translate=lambda error: peel(error, submitted.actor, submitted.if_dead),
        )

    def ship(self, push: WeightPush) -> WeightPush:
        """Buckets into the object store, one by one, so that no process holds them all."""
        buckets: tuple[Any, ...] = tuple(_put(bucket) for bucket in push.buckets)
        return replace(push, buckets=buckets)

    def is_here(self, node_id: str, host: str) -> bool:
        return node_id == ray.get_runtime_context().get_node_id()

    def own_host(self) -> str:
        address: str = ray.util.get_node_ip_address()
        return address


def _put(bucket: Any) -> Any:
    return ray.put(bucket) if isinstance(bucket, bytes) else bucket


def launch_ray(
    config: RolloutConfig, *, launcher: EngineLauncher | None = None
) -> DeploymentHandle:
    """Start all servers of ``config`` as actors; returns when they serve.

    Raises:
        ConfigError, PlacementError: before any engine is started.
        PhaseFailed: an engine did not start; nothing is left running.
    """
    check_paths(config)
    for name, server in config.servers.items():
        for group, of_group in server.groups.items():
            release_policy(f"servers.{name}.groups.{group}", of_group, server.weights.update)
    started_ray = _connect(config)
    undo = _Undo(started_ray)
    loop = LoopThread("rollout-deployment")
    try:
        plan = plan_placement(
            {name: server.groups for name, server in config.servers.items()},
            trainer_gpus=config.cluster.trainer_gpus,
        )
        undo.placement_group, granted = reserve(plan, timeout_s=config.cluster.placement_timeout_s)
        slots = assign_slots(plan, granted)
        placement = EnginePlacement(
            undo.placement_group,
            # An engine's own CPU or GPU share is set when it is placed.
            ray.remote(EngineActor),
            launcher or LocalLauncher(),
        )
        ports = {
            name: _make_server(config, name, slots, placement, undo) for name in config.servers
        }
    except BaseException:
        loop.close()
        undo()
        raise
    caller = RayCaller()
    return DeploymentHandle(
        config,
        {
            name: ServerHandle(name, config.servers[name], port, caller)
            for name, port in ports.items()
        },
        Deployment(
            ports,
            stop_budget_s=max(map(_stop_budget_s, config.servers.values())),
            lock_timeout_s=lock_timeout_s(config),
        ),
        loop,
        on_close=undo,
        placement_group=undo.placement_group,
    ).started()


def _connect(config: RolloutConfig) -> bool:
    """Join the cluster that is meant; True if this call made a new local one."""
    if ray.is_initialized():
        return False
    # Without an address ray.init joins any cluster it finds, and hangs on a stale address file.
    address = config.cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(
            address=address,
            namespace=config.cluster.namespace,
            logging_level=logging.WARNING,
            **options,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cluster.address = {address!r}: cannot join that Ray cluster: {error}",
            setting="cluster.address",
            value=address,
        ) from error
    return address == "local"


def _make_server(
    config: RolloutConfig,
    name: str,
    slots: dict[tuple[str, str], list[EngineSlot]],
    placement: EnginePlacement,
    undo: _Undo,
) -> RayServer:
    server = config.servers[name]
    # Router and server stay on the driver's node: its loopback is where the driver looks.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    control: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": here}
    full_name = f"rollout-{config.run_id}-{name}"
    terms = store_terms(config, name)
    agents: RemoteAgents | None = None
    sources: Sequence[WeightSource] = ()
    if terms is not None:
        nodes = store_nodes(slots, name)
        agents = place_agents(terms, nodes, config.cluster.namespace, undo.owns)
        undo.agents.append(agents)
        sources = (StoreSource(terms, agents, server.model_path),)
    run = RunFolder.of(config)
    journal = Journal.of(run.of_server(name) / JOURNAL_FILE, run.run_id, name, "ray")
    parts = ServerParts(
        router_class=ray.remote(**control)(RouterActor),
        group_class=ray.remote(**control)(ServerGroupActor),
        groups={
            group: (group_settings(config, name, group, sources), slots[name, group])
            for group in started_groups(config, name)
        },
        placement=replace(placement, owner=(config.cluster.namespace, full_name)),
    )
    actor = undo.owns(
        ray.remote(**control)(RolloutServerActor)
        .options(name=full_name, namespace=config.cluster.namespace)
        .remote(name, run, server, parts, journal, terms, agents)
    )
    return RayServer(actor, full_name)


def _stop_budget_s(server: ServerConfig) -> float:
    """Router and engines keep their own deadlines; past both, the server itself hangs."""
    return 2 * server.lifecycle.stop_timeout_s + _STOP_MARGIN_S


class _Undo:
    """What this launch made, undone in reverse; an actor with a hung call only dies of a kill."""

    def __init__(self, started_ray: bool) -> None:
        self._actors: list[Any] = []
        self._started_ray = started_ray
        self.placement_group: Any = None
        self.agents: list[RemoteAgents] = []

    def owns(self, actor: Any) -> Any:
        self._actors.append(actor)
        return actor

    def __call__(self) -> None:
        for agents in self.agents:
            end_agents(agents)
        for actor in reversed(self._actors):
            ray.kill(actor)
        if self.placement_group is not None:
            remove_placement_group(self.placement_group)
        if self._started_ray:
            ray.shutdown()
