"""Creates and places the actors of a run; the only user of the whole configuration."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from engines.launch import EngineLauncher, LocalLauncher
from engines.process.background import Then, in_own_thread, keep_task, start_task
from engines.protocol import GpuId
from engines.protocol.plain_text import describe
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.agents.worker.host import worker_settings
from rollout.config import RolloutConfig
from rollout.config.run_dir import RunFolder
from rollout.config.sources.environment import options_of_actors
from rollout.config.sources.hub import HubModel
from rollout.control.server.journal import read
from rollout.core.errors import ConfigError, EngineFailure, RolloutError
from rollout.core.pending import LoopThread
from rollout.core.types import EngineSlot, ServerStatus
from rollout.router.host import new_run
from rollout.rules.deadlines import STOP_TIMEOUT_S, kill_timeout_s
from rollout.rules.placement import ELSEWHERE, assign_slots, plan_of, trainer_slots
from rollout.runtime.agents_actor import AgentsActor
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import (
    group_settings,
    server_journal,
    started_groups,
    store_nodes,
    store_terms,
)
from rollout.runtime.preflight import check_before_launch, open_engines
from rollout.runtime.ray.engine_handle import ActorName, EngineActor
from rollout.runtime.ray.engine_launcher import EnginePlacement
from rollout.runtime.ray.find_servers import (
    LaunchByOwner,
    LaunchParts,
    owner_name,
    server_actor,
)
from rollout.runtime.ray.group_actor import ServerGroupActor
from rollout.runtime.ray.nodes import (
    confirm_ended,
    engine_host,
    has_started_cluster,
    on_node,
    read_addresses,
    why_not_joined,
)
from rollout.runtime.ray.placement_group import (
    ExistingGroup,
    remove_unused,
    reserve,
    still_used,
    used_of,
)
from rollout.runtime.ray.router_actor import RouterActor
from rollout.runtime.ray.server_actor import RolloutServerActor, ServerParts
from rollout.runtime.ray.store_agents import end_agents, place_agents
from rollout.runtime.run_lock import RunLock
from rollout.weights.store.agents import RemoteAgents
from rollout.weights.store.restore import StoreSource
from rollout.weights.store.weight_source import WeightSource

logger = logging.getLogger(__name__)

_STOP_MARGIN_S = 20.0
_UNUSED_TIMEOUT_S = 5.0
_LEFTOVER_TIMEOUT_S = 30.0
# 1 TB at 200 MB/s takes 5000 s.
_DOWNLOAD_S = 7200.0
# For the answer of an owner that ends to reach its caller.
_ANSWER_S = 10.0
# For the process of an owner to start, and to make the actors of the run.
_PLACED_MARGIN_S = 120.0
_POLL_S = 0.5
_ENDS_WITH_SCRIPT = (
    "detached=True: the Ray cluster would end with this script, which starts it, and the run with "
    "it; start one with `ray start --head`, or run the script as a Ray job, and set "
    "cluster.address to auto, or RAY_ADDRESS"
)


def launch_ray(
    config: RolloutConfig,
    *,
    launcher: EngineLauncher | None = None,
    placement_group: Any = None,
    bundles: Sequence[int] | Mapping[int, GpuId] | None = None,
    expect_version: int = 0,
    wait: bool = True,
    detached: bool = False,
) -> DeploymentHandle:
    """Start all servers of ``config`` as actors; returns when they serve.

    Args:
        placement_group, bundles, expect_version, wait, detached: see ``rollout.launch``.

    Raises:
        ConfigError, PlacementError: before any engine is started.
        PhaseFailed: an engine did not start; nothing is left running.
    """
    check_before_launch(config, launches_here=False)
    existing = ExistingGroup.of(placement_group, bundles)
    if not detached:
        return _handle(*_place(config, launcher, existing), expect_version).started(wait=wait)
    if existing is not None:
        raise ValueError(
            "detached=True: a run that outlives this script makes its own placement group; leave "
            "placement_group out, and place the trainer in the group of the run, with "
            "deployment.placement_group and deployment.trainer_slots"
        )
    return _launch_detached(config, launcher, expect_version, wait=wait)


def _place(
    config: RolloutConfig,
    launcher: EngineLauncher | None,
    existing: ExistingGroup | None = None,
    *,
    is_detached: bool = False,
) -> tuple[LaunchParts, _Undo]:
    """The actors of a launch, which end with this process, and what undoes it."""
    undo = _Undo(RunLock(RunFolder.of(config), is_detached=is_detached))
    try:
        undo.started_ray = _connect(config)
        _refuse_open_engines(config)
        plan, timeout_s = plan_of(config), config.cluster.placement_timeout_s
        if existing is not None:
            group: Any = existing.group
            granted = existing.locate(plan, timeout_s=timeout_s)
        else:
            group, granted = reserve(plan, timeout_s=timeout_s)
            undo.placement_group = group
        slots = assign_slots(plan, granted)
        here = ray.get_runtime_context().get_node_id()
        for name, server in config.servers.items():
            fetch_models([server.model_path], set(store_nodes(slots, name)) - {here, ELSEWHERE})
        # The share of an engine in its bundle is set when it is placed.
        place = partial(
            EnginePlacement, group, ray.remote(EngineActor), launcher or LocalLauncher()
        )
        actors = {name: _make_server(config, name, slots, place, undo) for name in config.servers}
    except BaseException:
        undo()
        raise
    parts = LaunchParts(
        config,
        actors,
        stop_budget_s=_stop_budget_s(config),
        stacked=tuple(plan.stacked),
        placement_group=group,
        trainer_slots=trainer_slots(plan, granted),
        node_ids=tuple({bundle.node_id for bundle in granted}),
    )
    return parts, undo


def _handle(parts: LaunchParts, undo: _Undo, expect_version: int) -> DeploymentHandle:
    """The handle of a launch that this process owns; its servers are not started yet."""
    return DeploymentHandle(
        parts.config,
        parts.handles(),
        parts.deployment(expect_version),
        LoopThread("deployment"),
        on_close=undo,
        placement_group=parts.placement_group,
        trainer_slots=parts.trainer_slots,
    )


def _launch_detached(
    config: RolloutConfig, launcher: EngineLauncher | None, expect_version: int, *, wait: bool
) -> DeploymentHandle:
    """Have an actor launch that outlives this script, and connect to it."""
    _connect(config, may_start=False)
    name = owner_name(config.run_id, config.cluster.namespace)
    # The folder of the logs is beside the script, as in a launch that ends with it.
    config = config.model_copy(update={"log_dir": str(Path(config.log_dir).absolute())})
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    exports_spans = any(server.timeline.otel for server in config.servers.values())
    variables = options_of_actors(exports_spans=exports_spans)
    actor_class = ray.remote(num_cpus=0, max_restarts=0, **variables)(LaunchOwner)
    options = actor_class.options(
        name=name.name,
        namespace=name.namespace,
        lifetime="detached",
        scheduling_strategy=here,
    )
    if name.find() is not None:
        raise _why_taken(config, name)
    try:
        owner = name.once_free(lambda: options.remote(name, config, launcher, expect_version))
    except ValueError:  # another script was faster
        raise _why_taken(config, name) from None
    launch = LaunchByOwner(owner, name)
    try:
        placed_s = config.cluster.placement_timeout_s + _PLACED_MARGIN_S
        return launch.handle(placed_s).started(wait=wait)
    except BaseException:
        launch.stop()
        raise


def _why_taken(config: RolloutConfig, name: ActorName) -> ConfigError:
    return ConfigError(
        f"run_id = {config.run_id!r}: a detached run of that id lives (actor {name.name} in "
        f"namespace {name.namespace!r}); rollout.connect({config.run_id!r}, backend='ray') goes on "
        f"with it, `rollout stop {config.run_id} --ray` ends it; or choose another run_id",
        setting="run_id",
        value=config.run_id,
    )


class LaunchOwner:
    """Owns a launch in place of the training script: all that it has started ends with this actor.

    It is an async actor.

    Args:
        name: its own.
        launcher: starts the engines; None starts them as child processes.
    """

    def __init__(
        self,
        name: ActorName,
        config: RolloutConfig,
        launcher: EngineLauncher | None,
        expect_version: int,
    ) -> None:
        self._name = name
        placing = asyncio.to_thread(_place, config, launcher, is_detached=True)
        self._placing = start_task(placing, "place")
        self._starting = start_task(self._start(expect_version), "start")
        self._ending: asyncio.Task[None] | None = None
        keep_task(self._end_if_failed, "end-if-failed", Then.IS_OVER)

    async def _start(self, expect_version: int) -> DeploymentHandle:
        handle = _handle(*await self._placing, expect_version)
        return await asyncio.to_thread(handle.started, wait=False)

    async def parts(self) -> LaunchParts:
        """The parts of the launch, as soon as they are placed; or its error."""
        parts, _ = await asyncio.shield(self._placing)
        return parts

    async def ready(self) -> dict[str, ServerStatus]:
        """The status of all servers when they have started; or the error of the launch."""
        return await (await asyncio.shield(self._starting)).ready()

    async def stop(self) -> list[str]:
        """End the launch; the resources of its placement group that others use, by name."""
        try:
            if not self._placing.done():  # what it has made so far ends with this actor
                return []
            await asyncio.wait([self._starting])
            if self._starting.exception() is None:  # else it has ended what it had started
                await asyncio.to_thread(self._starting.result().stop)
                await asyncio.to_thread(self._remove_leftovers)
            return await asyncio.to_thread(self._used_by_others)
        finally:
            self._end_soon()

    def _remove_leftovers(self) -> None:
        parts, _ = self._placing.result()
        if tasks := parts.remove_leftovers():
            ray.wait(tasks, num_returns=len(tasks), timeout=_LEFTOVER_TIMEOUT_S)

    def _used_by_others(self) -> list[str]:
        """What actors of a trainer, which may go on, use of the placement group of the launch."""
        if not self._placing.done() or self._placing.exception() is not None:
            return []
        parts, _ = self._placing.result()
        return [] if parts.placement_group is None else used_of(parts.placement_group)

    def _wait_unused(self) -> None:
        # Without a deadline: the group ends with this actor, and so would a trainer that works.
        while self._used_by_others():
            time.sleep(_POLL_S)

    async def _end_if_failed(self) -> None:
        try:
            await self.ready()
        except Exception as error:  # its callers get it, if any lives
            logger.error("the launch has failed: %s", describe(error))
            self._end_soon()

    def _end_soon(self) -> None:
        if self._ending is None:
            self._ending = keep_task(self._end, "end", Then.STARTS_AGAIN)

    async def _end(self) -> None:
        """End this actor, and with it the placement group, when the callers have their answers."""
        await asyncio.sleep(_ANSWER_S)
        await asyncio.to_thread(self._wait_unused)
        ray.kill(await asyncio.to_thread(self._name.find))


def _stop_budget_s(config: RolloutConfig) -> float:
    """The deadlines of router and engines; beyond them a server hangs."""
    engines = [
        group.engine for server in config.servers.values() for group in server.groups.values()
    ]
    return _STOP_MARGIN_S + 2 * STOP_TIMEOUT_S + max(map(kill_timeout_s, engines))


def _connect(config: RolloutConfig, *, may_start: bool = True) -> bool:
    """Join the configured cluster; returns True if this call started a local one.

    Args:
        may_start: False refuses a cluster that ends with this process.
    """
    if ray.is_initialized():
        if not may_start and has_started_cluster():
            raise ConfigError(_ENDS_WITH_SCRIPT)
        return False
    # Without an address ray.init joins any cluster it finds, and hangs on a stale address file.
    address = config.cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local" and not may_start:
        raise ConfigError(_ENDS_WITH_SCRIPT, setting="cluster.address", value=address)
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
            f"cluster.address = {address!r}: cannot join that Ray cluster: {why_not_joined(error)}",
            setting="cluster.address",
            value=address,
        ) from error
    return address == "local"


def _refuse_open_engines(config: RolloutConfig) -> None:
    """Refuse engines that must not listen at the address of their node.

    Raises:
        ConfigError: all of them.
    """
    addresses = read_addresses()
    for host in sorted({engine_host(node_id, addresses) for node_id in addresses}):
        if found := list(open_engines(config, host)):
            raise ConfigError.of(found)


def _make_server(
    config: RolloutConfig,
    name: str,
    slots: dict[tuple[str, str], list[EngineSlot]],
    place: Callable[[ActorName], EnginePlacement],
    undo: _Undo,
) -> Any:
    server = config.servers[name]
    # Router and server stay on the driver's node, because the driver calls its loopback.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    control: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": here}
    control |= options_of_actors()
    own_name = ActorName(config.cluster.namespace, server_actor(config.run_id, name))
    terms = store_terms(config, name)
    agents: RemoteAgents | None = None
    sources: Sequence[WeightSource] = ()
    if terms is not None:
        nodes = store_nodes(slots, name)
        agents = place_agents(terms, nodes, own_name, undo.owns)
        undo.agents.append(agents)
        sources = (StoreSource(terms, agents, server.model_path),)
    run = RunFolder.of(config)
    journal = server_journal(config, name, "ray")
    undo.journals.append(journal.path)
    make = ray.remote(**control | {"max_restarts": -1})
    recording = control | options_of_actors(exports_spans=server.timeline.otel)
    owner = (own_name.namespace, own_name.name)
    placement = place(own_name)
    undo.placements.append(placement)
    launch = new_run()
    router = undo.owns(make(RouterActor).remote(server.router, run=launch, server=owner))
    workers = worker_settings(server, run.of_agents(name))
    parts = ServerParts(
        router=router,
        workers=tuple(
            undo.owns(make(AgentsActor).remote(settings, launch=launch)) for settings in workers
        ),
        group_class=ray.remote(**recording)(ServerGroupActor),
        groups={
            group: (group_settings(config, name, group, sources), slots[name, group])
            for group in started_groups(config, name)
        },
        placement=placement,
    )
    options = ray.remote(**recording | {"max_restarts": -1})(RolloutServerActor).options(
        name=own_name.name, namespace=own_name.namespace
    )
    arguments = (name, run, server, undo.keeps_ref(ray.put(parts)), journal, terms, agents)
    try:
        actor = own_name.once_free(lambda: options.remote(*arguments))
    except ValueError as error:
        raise ConfigError(
            f"run_id = {config.run_id!r}: the actor {own_name.name} of another run lives in "
            f"namespace {own_name.namespace!r} of the Ray cluster ({error}); stop that run, or "
            "choose another run_id or cluster.namespace",
            setting="run_id",
            value=config.run_id,
        ) from error
    return undo.owns(actor)


def fetch_models(folders: Collection[str], node_ids: Collection[str]) -> None:
    """Get models of the Hub onto other nodes, each the same commit in the same folder.  Blocks.

    Args:
        folders: of models; those that are not in the cache of the Hub are left out.
        node_ids: the nodes that need them.

    Raises:
        ConfigError: a node cannot get a model, or has its cache elsewhere.
    """
    started = {
        (node_id, folder): on_node(node_id, why_not_here, folder)
        for folder in filter(HubModel.downloaded, sorted(set(folders)))
        for node_id in node_ids
    }
    for (node_id, folder), object_ref in started.items():
        try:
            why = ray.get(object_ref, timeout=_DOWNLOAD_S)
        except GetTimeoutError:
            ray.cancel(object_ref, force=True)
            why = f"its download took more than {_DOWNLOAD_S:g} s"
        except RayError as error:
            why = str(error).partition("\n")[0]
        if why:
            raise ConfigError(f"model_path = {folder!r}: node {node_id}: {why}")


def why_not_here(folder: str) -> str:
    """Why this node has no model of the Hub in a folder, after a try to get it."""
    model = HubModel.downloaded(folder)
    try:
        here = folder if model is None else model.folder()
    except ConfigError as error:
        return str(error)
    if Path(here) == Path(folder):
        return ""
    return f"its cache of the Hub has the model in {here}; set HF_HOME alike on all nodes"


async def end_leftovers(journals: Sequence[Path]) -> None:
    """End the engines of servers that were lost before they had ended them."""
    for path in journals:
        try:
            record = read(path)
        except RolloutError:  # it was lost before it wrote any
            continue
        for engine in () if record.is_ended else record.engines:
            try:
                await confirm_ended(
                    engine.engine_id, engine.node_id, engine.processes, _LEFTOVER_TIMEOUT_S
                )
            except EngineFailure as error:
                logger.error("%s", error)


class _Undo:
    """Undoes a launch in reverse order.  Actors are killed: one with a hung call cannot exit.

    Attributes:
        placement_group: the group that this launch has reserved; never an existing one.
        journals: of the servers; they list the engines of one that could not end them.
        placements: of the engine actors.
    """

    def __init__(self, lock: RunLock) -> None:
        self._actors: list[Any] = []
        self._lock = lock
        self.started_ray = False
        self.placement_group: Any = None
        self.agents: list[RemoteAgents] = []
        self.journals: list[Path] = []
        self.placements: list[EnginePlacement] = []
        self._object_refs: list[Any] = []

    def keeps_ref(self, object_ref: Any) -> Any:
        """Keep the arguments of an actor, which Ray needs to start it again."""
        self._object_refs.append(object_ref)
        return object_ref

    def owns(self, actor: Any) -> Any:
        self._actors.append(actor)
        return actor

    def __call__(self) -> None:
        try:
            for agents in self.agents:
                end_agents(agents)
            for actor in reversed(self._actors):
                ray.kill(actor)
            for placement in self.placements:
                placement.kill_actors()
            in_own_thread(lambda: asyncio.run(end_leftovers(self.journals)), "end").result()
            is_unused = self.placement_group is None or remove_unused(
                self.placement_group, timeout_s=_UNUSED_TIMEOUT_S
            )
            if self.started_ray and is_unused:
                self._shutdown()
        finally:
            self._lock.release()

    def _shutdown(self) -> None:
        if used := still_used(timeout_s=_UNUSED_TIMEOUT_S):
            logger.warning(
                "the Ray cluster that this run has started stays: others use %s of it; "
                "it ends with this process, or by ray.shutdown()",
                ", ".join(used),
            )
        else:
            ray.shutdown()
