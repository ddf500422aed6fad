"""Everything in this process: the servers on one event loop, the engines as child processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.launch import EngineLauncher, LocalLauncher
from engines.protocol import WorkerType
from rollout.config import RolloutConfig, ServerConfig, check_paths
from rollout.deployment import Deployment
from rollout.handle import DeploymentHandle, ServerHandle
from rollout.journal import Journal
from rollout.page.host import page_of
from rollout.pending import LoopThread, Pending
from rollout.placement import assign_slots, local_bundles, plan_placement
from rollout.router.host import RouterHost
from rollout.run_folder import JOURNAL_FILE, RunFolder
from rollout.server import RolloutServer
from rollout.server_group import GroupSettings, ServerGroup
from rollout.starting import Connect
from rollout.timeline.lines import recorded_in
from rollout.types import EngineSlot
from rollout.weights.push import WeightPush
from rollout.weights.source import WeightSource
from rollout.weights.store.agents import LocalAgents, StoreTerms
from rollout.weights.store.source import StoreSource
from rollout.weights.store.store import WeightStore


class LocalCaller:
    """Calls objects on an event loop of this process."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop

    def call(self, method: Callable[..., Any], *args: Any) -> Pending[Any]:
        return self._loop.submit(method(*args))

    def ship(self, push: WeightPush) -> WeightPush:
        return push

    def is_here(self, node_id: str, host: str) -> bool:
        return host in ("127.0.0.1", "localhost", "::1")

    def own_host(self) -> str:
        return "127.0.0.1"


def group_settings(
    config: RolloutConfig, server: str, group: str, sources: Sequence[WeightSource] = ()
) -> GroupSettings:
    """The slice of ``config`` that one group needs.

    Args:
        sources: of weights for engines that are started again, before the disk.
    """
    of_server = config.servers[server]
    return GroupSettings(
        name=group,
        path=f"servers.{server}.groups.{group}",
        model_path=of_server.model_path,
        log_dir=str(RunFolder.of(config).of_server(server)),
        group=of_server.groups[group],
        update=of_server.weights.update,
        lifecycle=of_server.lifecycle,
        health=of_server.health,
        otel=of_server.timeline.otel,
        sources=tuple(sources),
    )


def started_groups(config: RolloutConfig, server: str) -> list[str]:
    """Names of the groups that start engines; placeholders only keep their place."""
    return [
        name
        for name, group in config.servers[server].groups.items()
        if group.worker_type is not WorkerType.PLACEHOLDER
    ]


def build_servers(
    config: RolloutConfig,
    launcher: EngineLauncher,
    gpu_ids: Sequence[int],
    connect: Connect | None = None,
) -> dict[str, RolloutServer]:
    """The servers of ``config`` as objects; nothing is started.

    Args:
        connect: makes the client of an engine; None makes the one that drives SGLang over HTTP.

    Raises:
        ConfigError: a model directory is missing or a release would lose weights.
        PlacementError: there are fewer GPUs than the engines need.
    """
    check_paths(config)
    plan = plan_placement(
        {name: server.groups for name, server in config.servers.items()},
        trainer_gpus=config.cluster.trainer_gpus,
    )
    slots = assign_slots(plan, local_bundles(plan, gpu_ids, float(os.cpu_count() or 1)))
    run = RunFolder.of(config)

    def group_of(settings: GroupSettings, slots: Sequence[EngineSlot]) -> ServerGroup:
        timeline = recorded_in(settings.log_dir, settings.source, otel=settings.otel)
        return ServerGroup(settings, slots, launcher, connect, timeline=timeline)

    def server_of(name: str, server: ServerConfig) -> RolloutServer:
        terms = store_terms(config, name)
        store: WeightStore | None = None
        sources: Sequence[WeightSource] = ()
        if terms is not None:
            agents = LocalAgents(terms, store_nodes(slots, name))
            store = WeightStore(terms, agents, server.weights.update)
            sources = (StoreSource(terms, agents, server.model_path),)
        return RolloutServer(
            name,
            server,
            {
                group: group_of(group_settings(config, name, group, sources), slots[name, group])
                for group in started_groups(config, name)
            },
            RouterHost(server.router),
            store=store,
            timeline=recorded_in(run.of_server(name), name, otel=server.timeline.otel),
            page=page_of(server, run, name),
            journal=Journal.of(run.of_server(name) / JOURNAL_FILE, run.run_id, name, "local"),
        )

    return {name: server_of(name, server) for name, server in config.servers.items()}


def store_terms(config: RolloutConfig, server: str) -> StoreTerms | None:
    """Of a new life of a server's store; None if it has none."""
    store = config.servers[server].weights.store
    return None if store is None else StoreTerms.of(store, config.run_id, server)


def store_nodes(slots: Mapping[tuple[str, str], Sequence[EngineSlot]], server: str) -> list[str]:
    """The nodes that keep a server's weights: those that its engines are on."""
    own = (slot for (owner, _), slots_of in slots.items() if owner == server for slot in slots_of)
    return sorted({share.node_id for slot in own for share in slot.shares})


def lock_timeout_s(config: RolloutConfig) -> float:
    """How long a transaction over all servers waits for the one before it."""
    return max(server.lifecycle.lock_timeout_s for server in config.servers.values())


def visible_gpus() -> list[int]:
    """GPU ids of this machine that ``CUDA_VISIBLE_DEVICES`` allows, as NVIDIA's driver lists them.

    Needs no CUDA library: the driver shows each GPU under ``/proc/driver/nvidia/gpus``.
    """
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [int(part) for part in allowed.split(",") if part.strip().isdigit()]
    listed = Path("/proc/driver/nvidia/gpus")
    return list(range(len(list(listed.iterdir())))) if listed.is_dir() else []


def launch_local(
    config: RolloutConfig,
    *,
    launcher: EngineLauncher | None = None,
    connect: Connect | None = None,
) -> DeploymentHandle:
    """Start all servers of ``config`` in this process; returns when they serve.

    Args:
        launcher: starts the engines; None starts them as child processes.
        connect: makes the client of an engine; a test's may do less than it is asked.

    Raises:
        ConfigError, PlacementError: before anything is started.
        PhaseFailed: an engine did not start; nothing is left running.
    """
    servers = build_servers(config, launcher or LocalLauncher(), visible_gpus(), connect)
    loop = LoopThread("rollout")
    caller = LocalCaller(loop)
    return DeploymentHandle(
        config,
        {
            name: ServerHandle(name, config.servers[name], server, caller)
            for name, server in servers.items()
        },
        Deployment(servers, lock_timeout_s=lock_timeout_s(config)),
        loop,
    ).started()
