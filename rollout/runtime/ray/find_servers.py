"""Finds the servers of a run on a Ray cluster, and queries them while they work.

A detached run has an owner, an actor that has launched it; it is found by the run's id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from engines.protocol import ProcessIdentity
from ray.util import list_named_actors

from rollout.config import RolloutConfig
from rollout.control.deployment import Deployment
from rollout.control.server.server import RolloutServer
from rollout.core.errors import ActorLost, ConfigError, RolloutError
from rollout.core.pending import Pending
from rollout.core.types import ServerStatus, TrainerSlot
from rollout.observability.page.state_cache import StateCache
from rollout.runtime.handle import RunHandle, ServerHandle
from rollout.runtime.handle.detached_handle import DetachedHandle
from rollout.runtime.local import longest_lock_s
from rollout.runtime.ray.engine_handle import ActorName
from rollout.runtime.ray.handles import RayCaller, RemoteServer, remote_server
from rollout.runtime.ray.nodes import on_node, why_not_joined
from rollout.runtime.ray.remote_call import RemoteCall, peel
from rollout.weights.routes.buffers import remove_leftovers

logger = logging.getLogger(__name__)

_PARTS_TIMEOUT_S = 60.0
_OWNER_LOST = "the detached run has ended with it; launch it again"
_STOP_TIMEOUT_S = 120.0
_LOG_TIMEOUT_S = 15.0


@dataclass(slots=True)
class ServerViaActor:
    """One server actor; ``rollout.cli.lib.find_run.RunningServer``.

    Attributes:
        launch: of a detached run, which a stop ends as a whole.
    """

    name: str
    where: str
    port: RemoteServer
    launch: LaunchByOwner | None = None
    process: ProcessIdentity | None = None
    cache: StateCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = StateCache(self.port.observe)

    def state(self) -> dict[str, Any]:
        asyncio.run(self.cache.refresh())
        return {"can_steer": True, "run_id": self.where, **self.cache.snapshot()}

    def log_tail(self, engine_id: str) -> str:
        tail: str = asyncio.run(_within(_LOG_TIMEOUT_S, self.port.log_tail(engine_id)))
        return tail

    def stop(self) -> None:
        if self.launch is not None:
            self.launch.stop()
            return
        try:
            asyncio.run(_within(_STOP_TIMEOUT_S, self.port.stop()))
        except ActorLost as error:
            if not error.is_dead:  # a script whose server stops may end the actor during the call
                raise


async def _within(budget_s: float, call: RemoteCall[Any]) -> Any:
    async with asyncio.timeout(budget_s):
        return await call


@dataclass(frozen=True, slots=True)
class LaunchParts:
    """What a launch has made, for the process that drives it.

    Attributes:
        actors: of the servers, by name.
        stop_budget_s: deadline for one server to stop.
        stacked: the servers that share a GPU with an earlier server.
        node_ids: the nodes of the placement group.
    """

    config: RolloutConfig
    actors: Mapping[str, Any]
    stop_budget_s: float
    stacked: tuple[str, ...]
    placement_group: Any
    trainer_slots: tuple[TrainerSlot, ...]
    node_ids: tuple[str, ...]

    def handles(self) -> dict[str, ServerHandle]:
        """A handle for each server."""
        config = self.config
        return {
            name: ServerHandle(
                name, config.servers[name], RayCaller(actor, server_actor(config.run_id, name))
            )
            for name, actor in self.actors.items()
        }

    def remove_leftovers(self) -> list[Any]:
        """Remove the buckets of killed trainers: here at once, on the other nodes by tasks.

        Returns:
            The object refs of the tasks.
        """
        roots = {server.weights.shared_memory_path for server in self.config.servers.values()}
        here = ray.get_runtime_context().get_node_id()
        for root in roots:
            remove_leftovers(Path(root))
        return [
            on_node(node_id, remove_leftovers, Path(root))
            for node_id in self.node_ids
            for root in roots
            if node_id != here
        ]

    def deployment(self, expect_version: int = 0) -> Deployment:
        """All servers together, driven from this process."""
        return Deployment(
            {
                name: remote_server(actor, server_actor(self.config.run_id, name))
                for name, actor in self.actors.items()
            },
            stop_budget_s=self.stop_budget_s,
            lock_timeout_s=longest_lock_s(self.config),
            stacked=self.stacked,
            expect_version=expect_version,
        )


class LaunchByOwner:
    """A detached launch, through the actor that owns it.

    Args:
        owner: the handle of that actor.
        name: its name.
    """

    def __init__(self, owner: Any, name: ActorName) -> None:
        self._owner = owner
        self._name = name

    @classmethod
    def find(cls, run_id: str, namespace: str) -> LaunchByOwner | None:
        """The launch of a run, or None if no detached run of that id lives."""
        name = owner_name(run_id, namespace)
        owner = name.find()
        return None if owner is None else cls(owner, name)

    def handle(self, timeout_s: float = _PARTS_TIMEOUT_S) -> DetachedHandle:
        """A handle of the run, also while it starts.

        Buckets of killed trainers in the shared memory of this host and of the engines' nodes are
        removed.

        Raises:
            ConfigError, PlacementError: the launch has failed.
            TimeoutError: it is not placed within ``timeout_s``.
        """
        parts: LaunchParts = self._call(self._owner.parts.remote()).result(timeout_s)
        parts.remove_leftovers()
        return DetachedHandle(
            parts.config,
            parts.handles(),
            parts.deployment(),
            self,
            placement_group=parts.placement_group,
            trainer_slots=parts.trainer_slots,
        )

    def ready(self) -> Pending[dict[str, ServerStatus]]:
        """The launch; see ``DeploymentHandle.ready``."""
        return self._call(self._owner.ready.remote())

    def stop(self) -> None:
        """End the run and its owner; returns when the run's id is free, or in use by a trainer."""
        try:
            used = self._call(self._owner.stop.remote()).result(_STOP_TIMEOUT_S)
        except ActorLost as error:
            if not error.is_dead:  # another one has stopped it
                raise
            used = []
        except TimeoutError:
            logger.error("run of %s did not stop within %g s", self._name.name, _STOP_TIMEOUT_S)
            used = []
        if used:
            logger.warning(
                "the placement group stays: actors or tasks that the run did not start use %s of "
                "it; it ends with them, and until then the id of the run is taken",
                ", ".join(used),
            )
            return
        ray.kill(self._owner)
        self._name.wait_free()

    def _call(self, object_ref: Any) -> Pending[Any]:
        return Pending(
            object_ref.future(),
            object_ref=object_ref,
            translate=lambda error: peel(error, self._name.name, _OWNER_LOST),
        )


@dataclass(slots=True)
class OwnerAlone:
    """A detached run without servers, to stop it; ``rollout.cli.lib.find_run.RunningServer``."""

    launch: LaunchByOwner
    where: str
    name: str = "(none lives)"
    process: ProcessIdentity | None = None

    def state(self) -> dict[str, Any]:
        raise RolloutError(f"{self.where}: no server of this detached run lives; rollout stop it")

    def log_tail(self, engine_id: str) -> str:
        raise RolloutError(f"{self.where}: no server of this detached run lives")

    def stop(self) -> None:
        self.launch.stop()


def find_servers(
    run_id: str, *, address: str, namespace: str
) -> Sequence[ServerViaActor | OwnerAlone]:
    """The server actors of a run, to query them.

    Raises:
        ConfigError: the cluster cannot be joined, or the run has no server there.
    """
    _join(address, namespace)
    launch = LaunchByOwner.find(run_id, namespace)
    actors = _actors_of(run_id, namespace)
    if launch is not None and not actors:
        return [OwnerAlone(launch, f"actor {owner_name(run_id, namespace).name}")]
    if not actors:
        raise _no_server(run_id, namespace)
    return [
        ServerViaActor(server, f"actor {name}", RemoteServer(actor, name), launch)
        for server, (name, actor) in actors.items()
    ]


def connect_run(run_id: str, *, address: str, namespace: str) -> RunHandle:
    """The servers of a run; of a detached one a ``DeploymentHandle``.  Errors as ``find_servers``.

    Raises:
        TimeoutError: a detached run is not placed yet.
    """
    _join(address, namespace)
    if (launch := LaunchByOwner.find(run_id, namespace)) is not None:
        return launch.handle()
    actors = _actors_of(run_id, namespace)
    if not actors:
        raise _no_server(run_id, namespace)
    callers = {server: RayCaller(actor, name) for server, (name, actor) in actors.items()}
    return RunHandle(
        {
            server: ServerHandle(server, caller.call(RolloutServer.config).result(), caller)
            for server, caller in callers.items()
        }
    )


def _join(address: str, namespace: str) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(
            address=address, namespace=namespace, logging_level=logging.ERROR, log_to_driver=False
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        why = why_not_joined(error)
        raise ConfigError(f"address {address!r}: cannot join that Ray cluster: {why}") from None


def _actors_of(run_id: str, namespace: str) -> dict[str, tuple[str, Any]]:
    """Name and handle of each server's actor, by server."""
    actors = list_named_actors(all_namespaces=True)
    here = sorted(actor["name"] for actor in actors if actor["namespace"] == namespace)
    return {
        server: (name, ray.get_actor(name, namespace=namespace))
        for name in here
        if (server := server_of(name, run_id))
    }


def _no_server(run_id: str, namespace: str) -> ConfigError:
    others = sorted(
        f"{actor['name']} in namespace {actor['namespace']!r}"
        for actor in list_named_actors(all_namespaces=True)
        if actor["name"].startswith("rollout-")
    )
    return ConfigError(
        f"no server of run {run_id!r} in namespace {namespace!r}; "
        f"named actors of that cluster: {', '.join(others) or 'none'}"
    )


def server_actor(run_id: str, server: str) -> str:
    """The name of a server's actor in the cluster."""
    return f"rollout-{run_id}-{server}"


def owner_name(run_id: str, namespace: str) -> ActorName:
    """The name of the actor that owns a detached run; never that of a server."""
    return ActorName(namespace, f"owner-of-rollout-{run_id}")


def server_of(actor: str, run_id: str) -> str:
    """The server of this run whose actor has this name, or empty if it is of another run.

    A server's name has no ``-``, so ``rollout-a-b-policy`` is of run ``a-b``, not of run ``a``.
    """
    run, _, server = actor.removeprefix("rollout-").rpartition("-")
    return server if actor.startswith("rollout-") and run == run_id else ""
