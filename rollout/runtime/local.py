"""Runs a deployment in this process: servers on one event loop, engines as child processes."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from engines.http.trace_context import in_callers_trace
from engines.launch import EngineLauncher, LocalLauncher
from engines.process.gpu_memory import number_of_gpus
from engines.protocol import GpuId, WorkerType, read_gpu_id
from rollout.agents.worker.host import worker_settings
from rollout.config import RolloutConfig, ServerConfig
from rollout.config.run_dir import JOURNAL_FILE, RunFolder
from rollout.control.deployment import Deployment
from rollout.control.engine.start import Connect
from rollout.control.group.server_group import GroupSettings, ServerGroup
from rollout.control.server.agents_client import AgentsClient
from rollout.control.server.journal import ServerJournal
from rollout.control.server.server import RolloutServer
from rollout.core.pending import LoopThread, Pending
from rollout.core.types import EngineSlot
from rollout.observability.page.page_host import PageHost
from rollout.observability.timeline.span_file import create_timeline
from rollout.router.host import RouterHost
from rollout.rules.deadlines import lock_timeout_s
from rollout.rules.placement import assign_slots, local_bundles, plan_of, trainer_slots
from rollout.runtime.agents_process import AgentsProcess
from rollout.runtime.calls.caller import LAUNCH_NODE, node_without_ray
from rollout.runtime.control_socket import ControlAddress, ControlListener, SocketCaller
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from rollout.runtime.preflight import check_before_launch
from rollout.runtime.run_lock import RunLock
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.store.agents import LocalAgents, StoreTerms
from rollout.weights.store.restore import StoreSource
from rollout.weights.store.store import WeightStore
from rollout.weights.store.weight_source import WeightSource

P = ParamSpec("P")
T = TypeVar("T")


class LocalCaller:
    """Calls a server on an event loop of this process.

    Pickled, or in a forked child, it calls over the socket.
    """

    backend = "local"

    def __init__(self, loop: LoopThread, server: RolloutServer, address: ControlAddress) -> None:
        self._loop = loop
        self._server = server
        self._address = address

    def __reduce__(self) -> tuple[type[SocketCaller], tuple[ControlAddress, str]]:
        return SocketCaller, (self._address, self._server.name)

    def call(
        self,
        method: Callable[Concatenate[RolloutServer, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[T]:
        if self._loop.why_not_here:
            return SocketCaller(self._address, self._server.name).call(method, *args, **kwargs)
        return self._loop.submit(in_callers_trace(method(self._server, *args, **kwargs)))

    def ship(self, push: WeightPush) -> WeightPush:
        return push

    def node_of(self, node_id: str, host: str) -> str:
        return node_without_ray(host)

    def own_node(self) -> str:
        return LAUNCH_NODE

    def own_host(self) -> str:
        return "127.0.0.1"


def group_settings(
    config: RolloutConfig, server: str, group: str, sources: Sequence[WeightSource] = ()
) -> GroupSettings:
    """The part of ``config`` that one group needs.

    Args:
        sources: weight sources for restarted engines, tried before the disk.
    """
    of_server = config.servers[server]
    return GroupSettings(
        name=group,
        path=f"servers.{server}.groups.{group}",
        model_path=of_server.model_path,
        log_dir=str(RunFolder.of(config).of_server(server)),
        run_id=config.run_id,
        group=of_server.groups[group],
        update=of_server.weights.update,
        lifecycle=of_server.lifecycle,
        verify=of_server.verify,
        health=of_server.health,
        otel=of_server.timeline.otel,
        sources=tuple(sources),
        transport=of_server.weights.transport,
        encoding=of_server.weights.encoding,
        not_pushed=of_server.weights.not_pushed,
    )


def server_journal(config: RolloutConfig, server: str, backend: str) -> ServerJournal:
    """The journal of a server in this launch."""
    run = RunFolder.of(config)
    return ServerJournal.of(run.of_server(server) / JOURNAL_FILE, run.run_id, server, backend)


def started_groups(config: RolloutConfig, server: str) -> list[str]:
    """Names of the groups that start engines; placeholders only reserve their slots."""
    return [
        name
        for name, group in config.servers[server].groups.items()
        if group.worker_type is not WorkerType.PLACEHOLDER
    ]


def build_servers(
    config: RolloutConfig,
    launcher: EngineLauncher,
    slots: Mapping[tuple[str, str], Sequence[EngineSlot]],
    connect: Connect | None = None,
    *,
    journals: Mapping[str, ServerJournal],
) -> dict[str, RolloutServer]:
    """The servers of ``config`` as objects; nothing is started.

    Args:
        slots: (server, group) -> its slots.
        connect: creates the client of an engine; None creates the HTTP client.
        journals: of the servers, by name.

    Raises:
        ConfigError: a release would lose weights.
    """
    run = RunFolder.of(config)

    def group_of(settings: GroupSettings, slots: Sequence[EngineSlot]) -> ServerGroup:
        timeline = create_timeline(settings.log_dir, settings.source, otel=settings.otel)
        return ServerGroup(settings, slots, launcher, connect, timeline=timeline)

    def agents_of(name: str, server: ServerConfig) -> AgentsClient:
        folder = run.of_agents(name)
        workers = [AgentsProcess(settings) for settings in worker_settings(server, folder)]
        return AgentsClient(name, workers, folder)

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
            timeline=create_timeline(run.of_server(name), name, otel=server.timeline.otel),
            page=PageHost(server, run, name),
            agents=agents_of(name, server),
            journal=journals[name],
        )

    return {name: server_of(name, server) for name, server in config.servers.items()}


def store_terms(config: RolloutConfig, server: str) -> StoreTerms | None:
    """Terms for the weight store of a server, or None if it has none."""
    store = config.servers[server].weights.store
    return None if store is None else StoreTerms.of(store, config.run_id, server)


def store_nodes(slots: Mapping[tuple[str, str], Sequence[EngineSlot]], server: str) -> list[str]:
    """The nodes of a server's engines, which store its weights."""
    own = (slot for (owner, _), slots_of in slots.items() if owner == server for slot in slots_of)
    return sorted({share.node_id for slot in own for share in slot.shares})


def longest_lock_s(config: RolloutConfig) -> float:
    """How long a transaction over all servers waits for the previous one."""
    return max(lock_timeout_s(server.lifecycle) for server in config.servers.values())


def visible_gpus() -> list[GpuId]:
    """GPU ids of this machine that ``CUDA_VISIBLE_DEVICES`` allows.

    Needs no CUDA library: NVML counts the GPUs.  Without it the driver's list is read, which some
    containers do not have.
    """
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        found: list[GpuId] = []
        with suppress(ValueError):  # CUDA too ignores what follows an invalid id, such as -1
            found.extend(map(read_gpu_id, allowed.split(",")))
        return found
    if number := number_of_gpus():
        return list(range(number))
    listed = Path("/proc/driver/nvidia/gpus")
    return list(range(len(list(listed.iterdir())))) if listed.is_dir() else []


def launch_local(
    config: RolloutConfig,
    *,
    launcher: EngineLauncher | None = None,
    connect: Connect | None = None,
    expect_version: int = 0,
    wait: bool = True,
) -> DeploymentHandle:
    """Start all servers of ``config`` in this process; returns when they serve.

    Args:
        expect_version, wait: see ``rollout.launch``.
        launcher: starts the engines; None starts them as child processes.
        connect: creates the client of an engine; tests inject their own.

    Raises:
        ConfigError, PlacementError: before anything is started.
        PhaseFailed: an engine did not start; nothing is left running.
    """
    check_before_launch(config, launches_here=launcher is None)
    lock = RunLock(RunFolder.of(config))
    journals = {name: server_journal(config, name, "local") for name in config.servers}
    try:
        plan = plan_of(config)
        granted = local_bundles(plan, visible_gpus(), float(os.cpu_count() or 1))
        slots = assign_slots(plan, granted)
        servers = build_servers(
            config, launcher or LocalLauncher(), slots, connect, journals=journals
        )
    except BaseException:
        lock.release()
        raise
    loop = LoopThread("deployment")
    listener = ControlListener(loop, servers)
    where = listener.address
    for journal in journals.values():
        journal.keep(control=f"{where.host}:{where.port}", key=where.key)

    def close() -> None:
        listener.close()
        lock.release()

    return DeploymentHandle(
        config,
        {
            name: ServerHandle(
                name, config.servers[name], LocalCaller(loop, server, listener.address)
            )
            for name, server in servers.items()
        },
        Deployment(
            servers,
            lock_timeout_s=longest_lock_s(config),
            stacked=plan.stacked,
            expect_version=expect_version,
        ),
        loop,
        on_close=close,
        trainer_slots=trainer_slots(plan, granted),
    ).started(wait=wait)
