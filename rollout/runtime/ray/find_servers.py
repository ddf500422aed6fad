"""Finds the servers of a run on a Ray cluster, and queries them while they work."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import ray
from engines.protocol import ProcessIdentity
from ray.util import list_named_actors

from rollout.control.server.server import RolloutServer
from rollout.core.errors import ActorLost, ConfigError
from rollout.observability.page.state_cache import StateCache
from rollout.runtime.handle import ServerHandle
from rollout.runtime.ray.handles import RayCaller, RemoteServer
from rollout.runtime.ray.remote_call import RemoteCall

_STOP_TIMEOUT_S = 120.0
_LOG_TIMEOUT_S = 15.0


@dataclass(slots=True)
class ServerViaActor:
    """One server actor; ``rollout.cli.lib.find_run.RunningServer``."""

    name: str
    where: str
    port: RemoteServer
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
        try:
            asyncio.run(_within(_STOP_TIMEOUT_S, self.port.stop()))
        except ActorLost as error:
            if not error.is_dead:  # a script whose server stops may end the actor during the call
                raise


async def _within(budget_s: float, call: RemoteCall[Any]) -> Any:
    async with asyncio.timeout(budget_s):
        return await call


def find_servers(run_id: str, *, address: str, namespace: str) -> list[ServerViaActor]:
    """The server actors of a run, to query them.

    Raises:
        ConfigError: the cluster cannot be joined, or the run has no server there.
    """
    return [
        ServerViaActor(server, f"actor {name}", RemoteServer(actor, name))
        for server, (name, actor) in _actors_of(run_id, address, namespace).items()
    ]


def connect_servers(run_id: str, *, address: str, namespace: str) -> dict[str, ServerHandle]:
    """Handles of the servers of a run; errors as ``find_servers``."""
    callers = {
        server: RayCaller(actor, name)
        for server, (name, actor) in _actors_of(run_id, address, namespace).items()
    }
    return {
        server: ServerHandle(server, caller.call(RolloutServer.config).result(), caller)
        for server, caller in callers.items()
    }


def _actors_of(run_id: str, address: str, namespace: str) -> dict[str, tuple[str, Any]]:
    """Name and handle of each server's actor, by server."""
    if not ray.is_initialized():
        try:
            ray.init(
                address=address,
                namespace=namespace,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"address {address!r}: cannot join that Ray cluster: {error}"
            ) from None
    actors = list_named_actors(all_namespaces=True)
    here = [actor["name"] for actor in actors if actor["namespace"] == namespace]
    mine = {server: name for name in sorted(here) if (server := server_of(name, run_id))}
    if not mine:
        others = sorted(
            f"{actor['name']} in namespace {actor['namespace']!r}"
            for actor in actors
            if actor["name"].startswith("rollout-")
        )
        raise ConfigError(
            f"no server of run {run_id!r} in namespace {namespace!r}; "
            f"named actors of that cluster: {', '.join(others) or 'none'}"
        )
    return {
        server: (name, ray.get_actor(name, namespace=namespace)) for server, name in mine.items()
    }


def server_of(actor: str, run_id: str) -> str:
    """The server of this run whose actor has this name; empty if it is of another run.

    A server's name has no ``-``, so ``rollout-a-b-policy`` is of run ``a-b``, not of run ``a``.
    """
    run, _, server = actor.removeprefix("rollout-").rpartition("-")
    return server if actor.startswith("rollout-") and run == run_id else ""
