"""Several rollout servers on the same GPUs: policy, reference, reward, judge.

Always true: ``offload`` and ``serve`` are one transaction each over all servers.  The trainer's
GPUs are shared by all.  So no server releases before every server has flushed, and none serves
before every server can.  One transaction runs at a time.  A repeated transaction, also one that
failed, continues from the phase of each group.  One that failed or was cancelled leaves no gate
holding, also of servers that did their part.

Stacked servers have engines on the same GPUs.  They start and resume memory one after the other,
so that each is measured against what is really free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from engines.protocol.plain_text import describe
from rollout.control.server.server import RolloutServer
from rollout.core.command_lock import CommandLock
from rollout.core.errors import ActorLost
from rollout.core.fanout import barrier, run_to_completion
from rollout.core.types import ServerStatus, StepReport
from rollout.rules.lifecycle import OFFLOAD, SERVE_UPDATED, TAKE_MEMORY, Command, up_to
from rollout.weights.push.weight_push import WeightPush

logger = logging.getLogger(__name__)

T = TypeVar("T")
# For a server to close its gate: a call of its router, and a write of its journal.
_CLOSE_S = 60.0


class Deployment:
    """The lifecycle of all servers together.

    Args:
        stop_budget_s: deadline for one server to stop, or None if the server has its own.
        lock_timeout_s: how long a transaction waits for the previous one.
        stacked: the servers that share a GPU with an earlier server.
        expect_version: see ``RolloutServer.start``.
    """

    def __init__(
        self,
        servers: Mapping[str, RolloutServer],
        *,
        stop_budget_s: float | None = None,
        lock_timeout_s: float = 900.0,
        stacked: Collection[str] = (),
        expect_version: int = 0,
    ) -> None:
        self._servers = dict(servers)
        self._stop_budget_s = stop_budget_s
        self._lock = CommandLock(lock_timeout_s)
        self._expect_version = expect_version
        self._stacked = [name for name in self._servers if name in stacked]

    async def start(self) -> dict[str, ServerStatus]:
        """Start all servers; if one does not start, all are stopped again.

        Stacked servers start first, one after the other, and each is offloaded before the next
        starts.  They stay offloaded, and all other servers serve.
        """
        try:
            for name in self._stacked:
                await self._servers[name].start(self._expect_version)
                await self._servers[name].offload()
            starting = {
                name: self._servers[name].start(self._expect_version)
                for name in self._not_stacked()
            }
            await barrier(starting)
            return await self.status()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop all servers.  A lost or hanging server is logged; the launcher kills it."""
        await barrier({name: self._stop(name, server) for name, server in self._servers.items()})

    async def _stop(self, name: str, server: RolloutServer) -> None:
        try:
            async with asyncio.timeout(self._stop_budget_s):
                await server.stop()
        except Exception as error:  # the launcher must still kill the servers
            logger.error("server %s did not stop by itself: %s", name, describe(error))

    async def offload(self) -> dict[str, StepReport]:
        """Pause all servers, then flush all, then release all, in whatever phase they are."""
        async with self._lock.held("offload"):
            return await self._whole("offload", self._advance(*OFFLOAD))

    async def serve(
        self, pushes: Mapping[str, WeightPush], until: Command = Command.CONTINUE_GENERATION
    ) -> dict[str, StepReport]:
        """Resume the weights of all servers, push new weights, then serve.

        Args:
            until: the last command; another call, without pushes, does the rest.

        Raises:
            ValueError: a push for a server that does not exist.
        """
        for name in pushes:
            if name not in self._servers:
                known = ", ".join(self._servers)
                raise ValueError(f"no server {name!r} to push weights to; known: {known}")
        async with self._lock.held("serve"):
            unpushed = {
                name: server for name, server in self._servers.items() if name not in pushes
            }
            await barrier({name: server.check_can_restore() for name, server in unpushed.items()})
            last = up_to(until, SERVE_UPDATED)
            return await self._whole("serve", self._update_and(last, pushes))

    async def _update_and(
        self, last: Sequence[Command], pushes: Mapping[str, WeightPush]
    ) -> dict[str, StepReport]:
        await barrier({name: self._servers[name].make_idle() for name in pushes})
        reports = await self._advance(Command.ONLOAD_WEIGHTS)
        updated = await barrier(
            {
                name: server.update_weights(pushes[name])
                if name in pushes
                else server.advance(Command.UPDATE_WEIGHTS)
                for name, server in self._servers.items()
            }
        )
        ended = await self._advance(*last)
        return {
            name: report.merged(updated[name]).merged(ended[name])
            for name, report in reports.items()
        }

    async def _whole(self, operation: str, work: Awaitable[T]) -> T:
        """What ``work`` returns; if it is cut, requests do not wait for the rest of it."""
        try:
            return await work
        except BaseException as error:
            await run_to_completion(self._close_gates(operation, error))
            raise

    async def _close_gates(self, operation: str, error: BaseException) -> None:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        why = f"{operation} of all servers " + (
            "was cancelled" if is_cancelled else f"failed: {describe(error)}"
        )
        is_lost = isinstance(error, ActorLost)
        try:
            closing = {
                name: server.end_transaction(operation, why, is_lost=is_lost)
                for name, server in self._servers.items()
            }
            await barrier(closing, operation="close the gate", budget_s=_CLOSE_S)
        except Exception as more:  # must not hide the first failure
            logger.error("after a failed %s of all servers: %s", operation, describe(more))

    async def status(self) -> dict[str, ServerStatus]:
        """Status of every server."""
        return await barrier({name: server.status() for name, server in self._servers.items()})

    async def _advance(self, *commands: Command) -> dict[str, StepReport]:
        """Run each command on all servers before the next.  Servers already past it do nothing."""
        reports = {name: StepReport() for name in self._servers}
        for command in commands:
            for names in self._one_by_one(command):
                done = await barrier({name: self._servers[name].advance(command) for name in names})
                reports |= {name: reports[name].merged(report) for name, report in done.items()}
        return reports

    def _one_by_one(self, command: Command) -> Iterator[Sequence[str]]:
        """The servers that run a command at the same time, in order."""
        if command not in TAKE_MEMORY:
            yield list(self._servers)
            return
        yield self._not_stacked()
        for name in self._stacked:
            yield [name]

    def _not_stacked(self) -> list[str]:
        return [name for name in self._servers if name not in self._stacked]
