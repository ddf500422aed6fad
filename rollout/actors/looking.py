"""The servers of a run on a Ray cluster, from outside: found by name, asked while they work."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util import list_named_actors

from rollout.actors.handles import RayServer
from rollout.errors import ConfigError
from rollout.page.observatory import Observatory

_STOP_S = 120.0
_LOG_S = 15.0


@dataclass(slots=True)
class ActorSource:
    """One server actor; ``rollout.commands.sources.Source``."""

    name: str
    where: str
    port: RayServer
    pid: int | None = None
    folder: Path | None = None
    observatory: Observatory = field(init=False)

    def __post_init__(self) -> None:
        self.observatory = Observatory(self.port.observe)

    def state(self) -> dict[str, Any]:
        asyncio.run(self.observatory.refresh())
        return {"can_steer": True, "run_id": self.where, **self.observatory.snapshot()}

    def log_tail(self, engine_id: str) -> str:
        async def ask() -> str:
            async with asyncio.timeout(_LOG_S):
                return await self.port.log_tail(engine_id)

        return asyncio.run(ask())

    def stop(self) -> None:
        async def ask() -> None:
            async with asyncio.timeout(_STOP_S):
                await self.port.stop()

        asyncio.run(ask())


def find_servers(run_id: str, *, address: str, namespace: str) -> list[ActorSource]:
    """The server actors of a run.

    Raises:
        ConfigError: the cluster cannot be joined, or the run has no server there.
    """
    if not ray.is_initialized():
        try:
            ray.init(
                address=address,
                namespace=namespace,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--address {address!r}: cannot join that cluster: {error}") from None
    prefix = f"rollout-{run_id}-"
    names = [one["name"] for one in list_named_actors(all_namespaces=True)]
    spaces = {one["name"]: one["namespace"] for one in list_named_actors(all_namespaces=True)}
    mine = [one for one in names if one.startswith(prefix) and spaces[one] == namespace]
    if not mine:
        others = sorted(one for one in names if one.startswith("rollout-"))
        raise ConfigError(
            f"no server of run {run_id!r} in namespace {namespace!r}; "
            f"named actors there: {', '.join(others) or 'none'}"
        )
    return [
        ActorSource(
            name.removeprefix(prefix),
            f"actor {name}",
            RayServer(ray.get_actor(name, namespace=namespace), name),
        )
        for name in sorted(mine)
    ]
