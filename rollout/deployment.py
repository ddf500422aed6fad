"""Several rollout servers on the same GPUs: policy, reference, reward, judge.

Always true: offload and onload are one transaction over all servers.  The trainer's GPUs are
shared by all, so no server releases before every server has flushed, and none serves before
every server can.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from rollout.errors import ConfigError
from rollout.fanout import barrier
from rollout.types import ServerStatus, StepReport
from rollout.weights.manifest import Manifest
from rollout.weights.push import WeightPush


class ServerPort(Protocol):
    """A ``RolloutServer``, here or in an actor.  Every method starts its work at once."""

    def start(self) -> Awaitable[ServerStatus]: ...
    def stop(self) -> Awaitable[None]: ...
    def offload(self) -> Awaitable[StepReport]: ...
    def onload(self, push: WeightPush | None = None) -> Awaitable[StepReport]: ...
    def update_and_continue(self, push: WeightPush) -> Awaitable[StepReport]: ...
    def pause_generation(self) -> Awaitable[StepReport]: ...
    def flush_cache(self) -> Awaitable[StepReport]: ...
    def release_memory_occupation(self) -> Awaitable[StepReport]: ...
    def onload_weights(self) -> Awaitable[StepReport]: ...
    def update_weights(self, push: WeightPush) -> Awaitable[StepReport]: ...
    def verify(self) -> Awaitable[StepReport]: ...
    def onload_kv(self) -> Awaitable[StepReport]: ...
    def continue_generation(self) -> Awaitable[StepReport]: ...
    def status(self) -> Awaitable[ServerStatus]: ...
    def expected_manifest(self) -> Awaitable[Manifest | None]: ...


class Deployment:
    """The lifecycle of all servers together."""

    def __init__(self, servers: Mapping[str, ServerPort]) -> None:
        self._servers = dict(servers)

    async def start(self) -> dict[str, ServerStatus]:
        """Start all servers; if one does not start, all are stopped again."""
        try:
            return await barrier({name: one.start() for name, one in self._servers.items()})
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop all servers."""
        await barrier({name: one.stop() for name, one in self._servers.items()})

    async def offload(self) -> dict[str, StepReport]:
        """Every server paused, then every one flushed, then every one released."""
        return await self._steps(
            lambda one: one.pause_generation(),
            lambda one: one.flush_cache(),
            lambda one: one.release_memory_occupation(),
        )

    async def onload(self, pushes: Mapping[str, WeightPush]) -> dict[str, StepReport]:
        """Every server's weights, then new weights where there are any, then serve.

        Raises:
            ConfigError: a push for a server that does not exist.
        """
        for name in pushes:
            if name not in self._servers:
                raise ConfigError(
                    f"no server {name!r} to push weights to; known: {', '.join(self._servers)}"
                )
        reports = await self._steps(lambda one: one.onload_weights())
        updated = await barrier(
            {name: self._servers[name].update_weights(push) for name, push in pushes.items()}
        )
        served = await self._steps(
            lambda one: one.verify(),
            lambda one: one.onload_kv(),
            lambda one: one.continue_generation(),
        )
        for name, report in reports.items():
            if name in updated:
                report = report.merged(updated[name])
            reports[name] = report.merged(served[name])
        return reports

    async def status(self) -> dict[str, ServerStatus]:
        """Where every server is."""
        return await barrier({name: one.status() for name, one in self._servers.items()})

    async def _steps(
        self, *steps: Callable[[ServerPort], Awaitable[StepReport]]
    ) -> dict[str, StepReport]:
        reports = {name: StepReport() for name in self._servers}
        for step in steps:
            done = await barrier({name: step(one) for name, one in self._servers.items()})
            reports = {name: reports[name].merged(done[name]) for name in reports}
        return reports
