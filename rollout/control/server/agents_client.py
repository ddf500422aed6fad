"""The server's client of its workers of agents, and their folder.

Always true:
- the folder is new when the first worker begins, and removed when all have stopped; that of a lost
  launch is removed before, if it is ours and no process holds it;
- each call has a deadline, and one that a worker may have lost is repeated;
- a worker that hangs is killed, and another one starts in its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp

from engines.process.background import Then, keep_task
from engines.process.locks import Hold, held, make_held, remove_unheld
from engines.process.own_files import make_folders
from engines.process.process_identity import is_visible, kill_all
from engines.protocol import Endpoint, ProcessIdentity
from rollout.core.errors import ActorLost, PhaseTimeout, RolloutError
from rollout.core.fanout import barrier, wait_all

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A worker starts a process and binds its port.
_START_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 15.0
_MARGIN_S = 15.0
# Between two tries of a call that did not reach a worker.
_AGAIN_S = 0.02
# Workers of a launch that was killed end by themselves.
_LEFT_WITHIN_S = 10.0
_LOOK_AGAIN_S = 0.05
_WATCH_EVERY_S = 10.0
_MOST_LATE = 2


class Worker(Protocol):
    """An ``AgentsProcess``, or a handle of an ``AgentsActor``."""

    def start(self, router_url: str) -> Awaitable[Endpoint]: ...
    def stop(self, budget_s: float) -> Awaitable[None]: ...
    def stats(self) -> Awaitable[dict[str, Any]]: ...


class AgentsClient:
    """The workers of one server.

    Args:
        folder: of all its workers.

    Attributes:
        urls: base URLs of the workers, by their numbers, or empty if they do not run.
        watches: of the workers, by their numbers.
    """

    def __init__(self, server: str, workers: Sequence[Worker], folder: Path) -> None:
        self.urls: tuple[str, ...] = ()
        self._workers = {
            f"worker {number} of agents of server {server}": worker
            for number, worker in enumerate(workers)
        }
        self._folder = folder
        self._hold: Hold | None = None
        self.watches: tuple[Watch, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, router_url: str) -> None:
        """Start all workers, with a new folder.

        Raises:
            ConfigError: an address cannot be bound.
            RolloutError: something else is where the folder should be.
            PhaseTimeout: a worker has not started in time.
        """
        if not self._workers:
            return
        self._hold = await _new_folder(self._folder)
        started = await barrier(
            {
                name: _within(name, "start", _started(worker, router_url), _START_TIMEOUT_S)
                for name, worker in self._workers.items()
            }
        )
        self._serve_at([endpoint.url for endpoint in started.values()])

    def rejoin(self, urls: Sequence[str]) -> None:
        """Use the workers that outlived a lost server."""
        if self._workers:
            self._hold = held(self._folder)
            self._serve_at(urls)

    async def stop(self, budget_s: float) -> None:
        """Stop all workers, and remove their folder.

        Args:
            budget_s: for their turns to end.
        """
        self.urls = ()
        for task in self._tasks:
            task.cancel()
        await wait_all(self._tasks)
        hold, self._hold = self._hold, None
        if hold is None and not self.watches:  # none was started
            return
        try:
            await barrier(
                {
                    name: _within(name, "stop", _stopped(worker, budget_s), budget_s + _MARGIN_S)
                    for name, worker in self._workers.items()
                }
            )
        finally:
            if hold is not None:
                await asyncio.to_thread(hold.release)

    def _serve_at(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        workers = zip(self._workers.items(), urls, strict=True)
        self.watches = tuple(Watch(name, worker, url) for (name, worker), url in workers)
        self._tasks = [
            keep_task(watch.run, "watch of agents", Then.STARTS_AGAIN) for watch in self.watches
        ]


class Watch:
    """Kills a worker that has answered and then does not, twice in a row.

    One that was lost is started again by who made it, and is not waited for.
    """

    def __init__(self, name: str, worker: Worker, url: str) -> None:
        self._name = name
        self._worker = worker
        self._url = url
        self._process: ProcessIdentity | None = None
        self._num_late = 0

    @property
    def has_answered(self) -> bool:
        """Whether the process that serves now has."""
        return self._process is not None

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S)
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            async with aiohttp.ClientSession(timeout=timeout) as client:
                await self._look(client)

    async def _look(self, client: aiohttp.ClientSession) -> None:
        try:
            await _look_at(client, self._url)
        except TimeoutError:
            self._num_late += 1
            if self._num_late >= _MOST_LATE and (hanging := self._process) is not None:
                self._process = None
                logger.error(
                    "%s at %s hangs: it has not answered %d times within %g s; it is killed, and "
                    "another begins",
                    *(self._name, self._url, self._num_late, _CALL_TIMEOUT_S),
                )
                self._num_late = 0
                _kill(hanging)
        except aiohttp.ClientError:  # it was lost
            self._process = None
        else:
            self._num_late = 0
            with suppress(RolloutError):
                stats = self._worker.stats()
                self._process = (await _within(self._name, "stats", stats)).get("process")


async def _look_at(client: aiohttp.ClientSession, url: str) -> None:
    async with client.get(f"{url}/health"):
        pass  # any answer is one


def _kill(process: ProcessIdentity) -> None:
    if is_visible(process) and process.pid != os.getpid():
        kill_all({process.pid: process.started})


async def _started(worker: Worker, router_url: str) -> Endpoint:
    while True:
        try:
            return await worker.start(router_url)
        except ActorLost as error:
            if error.is_dead:
                raise
        await asyncio.sleep(_AGAIN_S)


async def _stopped(worker: Worker, budget_s: float) -> None:
    with suppress(ActorLost):  # it is lost just now, and ends with its actor
        await worker.stop(budget_s)


async def _within(name: str, what: str, call: Awaitable[T], budget_s: float = _CALL_TIMEOUT_S) -> T:
    try:
        async with asyncio.timeout(budget_s) as limit:
            return await call
    except TimeoutError:
        if not limit.expired():
            raise
    raise PhaseTimeout(
        f"{name} did not answer {what} within {budget_s:g} s",
        phase=what,
        budget_s=budget_s,
        late={name: what},
    )


async def _new_folder(folder: Path) -> Hold:
    """A new folder in the place of what a lost launch has left there.

    Raises:
        RolloutError: something else is there, or a process that uses it does not end.
    """
    clock = asyncio.get_running_loop().time
    until_s = clock() + _LEFT_WITHIN_S
    await asyncio.to_thread(make_folders, str(folder.parent))
    while True:
        try:
            return make_held(folder)
        except FileExistsError:
            if await asyncio.to_thread(remove_unheld, folder):
                continue
        if clock() > until_s:
            raise RolloutError(
                f"{folder}, for the sessions of agents, is there already, and is held by a "
                "process, or not known to be of ray-rollout; end that process, or move it away"
            )
        await asyncio.sleep(_LOOK_AGAIN_S)
