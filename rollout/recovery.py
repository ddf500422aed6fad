"""Watch the engines of a server, and bring back those that die.

Always true:
- a dead engine is out of routing before anything else is done about it;
- it is killed, and its group made to forget it, only between commands: under the server's command
  lock, whose owner is then ``recover``;
- a round that goes wrong is logged and the next one comes all the same;
- ``stop`` leaves no probe, no restart and no task behind.

What to think of an engine, and whom to start again when, is decided in ``health.py`` from what
``health_record.py`` has written down; what is done about it, in ``repair.py``.  Here is only when.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from rollout.config import HealthConfig
from rollout.errors import ActorLost, LifecycleError
from rollout.fanout import describe, settle
from rollout.health import Verdict
from rollout.health_record import GroupTerms, HealthRecord
from rollout.lifecycle import Phase
from rollout.lock import CommandLock
from rollout.ports import GROUP_MARGIN_S, FailureSource, RecoverableGroup
from rollout.repair import Repair
from rollout.watching import GroupProbe

logger = logging.getLogger(__name__)

OWNER = "recover"
_LISTEN_TIMEOUT_S = 30.0


class Server(Protocol):
    """What recovery asks of the server it belongs to."""

    @property
    def weight_version(self) -> int:
        """The version published last."""
        ...

    def phases(self) -> Mapping[str, Phase]:
        """Where each group is."""
        ...

    async def publish_members(self) -> object:
        """Tell the router who serves; it asks ``Recovery.out_of_routing`` among others."""
        ...

    async def revive_group(self, name: str) -> None:
        """Put another in the place of a group whose actor is lost."""
        ...


class Recovery:
    """The background of one server."""

    def __init__(
        self,
        name: str,
        config: HealthConfig,
        groups: Mapping[str, RecoverableGroup],
        terms: Mapping[str, GroupTerms],
        server: Server,
        router: FailureSource,
        lock: CommandLock,
        *,
        has_sources: bool = False,
    ) -> None:
        self._name = name
        self._config = config
        self._has_sources = (
            has_sources or config.weights_from_peers or config.weights_path is not None
        )
        self._groups = groups
        self._lost_groups: dict[str, RecoverableGroup] = {}
        self._server = server
        self._router = router
        self._lock = lock
        self._record = HealthRecord(config, terms, server.phases, _now)
        self._published: Mapping[str, tuple[Verdict, str]] | None = None
        self._look_now = asyncio.Event()
        self._work = asyncio.Event()
        self._repair = Repair(name, config, self._groups, self._record, self._work.set)
        self._task: asyncio.Task[None] | None = None

    # -- start and stop ---------------------------------------------------------------------

    def start(self, engines: Mapping[str, Iterable[str]]) -> None:
        """Begin to watch, if the configuration wants that.

        Args:
            engines: ids of those that have just been started, by group.
        """
        if self._config.recover and self._task is None:
            self._record.started(engines)
            self._task = asyncio.create_task(self._run(), name=f"recovery:{self._name}")

    async def stop(self) -> None:
        """End it, with what it was about to start; returns when nothing of it runs."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await settle([task])

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for act in (self._watch, self._listen, self._mend):
                tasks.create_task(self._again(act), name=f"recovery:{self._name}:{act.__name__}")

    async def _again(self, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await act()
            except Exception:  # one bad round must not end the watch
                logger.exception("server %s: recovery: %s went wrong", self._name, act.__name__)
                await asyncio.sleep(self._config.probe_interval_s)

    # -- watch: probes in, verdicts out -----------------------------------------------------

    async def _watch(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._look_now.wait(), self._config.probe_interval_s)
        self._look_now.clear()
        await self.look()

    async def look(self) -> None:
        """Probe all engines once and act on the verdicts."""
        before = self._record.snapshot()
        probes = await asyncio.gather(*(self._probe(name) for name in self._groups))
        for name, probe in zip(self._groups, probes, strict=True):
            if probe is not None:
                self._record.take_in(name, probe, before[name])
        await self._publish_if_changed()
        if self._has_work():
            self._work.set()

    async def _probe(self, name: str) -> GroupProbe | None:
        budget_s = self._config.probe_timeout_s
        distrusted = self._record.distrusted(name)
        group = self._groups[name]
        try:
            async with asyncio.timeout(2 * budget_s + GROUP_MARGIN_S):
                return await group.probe(budget_s, distrusted)
        except Exception as error:  # it says nothing about the engines
            if isinstance(error, ActorLost) and error.is_dead:
                self._lost_groups[name] = group
            logger.error("group %s/%s cannot be probed: %s", self._name, name, describe(error))
            return None

    # -- listen: what the router reports ----------------------------------------------------

    async def _listen(self) -> None:
        for engine_id, because in await self._router.failures(_LISTEN_TIMEOUT_S):
            # The router has taken it out by itself, and must hear how it is.
            self._record.reported(engine_id, because)
            self._published = None
            self._look_now.set()

    def look_soon(self) -> None:
        """Something went wrong with an engine: do not wait for the next probe."""
        self._look_now.set()

    # -- routing ----------------------------------------------------------------------------

    def out_of_routing(self) -> dict[str, tuple[Verdict, str]]:
        """Engines that get no requests whatever their group says, and why."""
        return self._record.out_of_routing()

    def has_published(self, out: Mapping[str, tuple[Verdict, str]]) -> None:
        """The router has been told."""
        self._published = out

    async def _publish_if_changed(self) -> None:
        if self.out_of_routing() != self._published:
            await self._server.publish_members()

    # -- places -----------------------------------------------------------------------------

    def has_left(self, group: str, engine_id: str) -> None:
        """This engine was removed: nobody is to watch it or bring it back."""
        self._record.left(group, engine_id)

    def has_joined(self, group: str, engine_id: str, *, is_stale: bool) -> None:
        """This engine was added."""
        self._record.joined(group, engine_id, is_stale=is_stale)

    # -- mend: fence, restart, adopt --------------------------------------------------------

    async def _mend(self) -> None:
        await self._wait_for_work()
        await self.mend()

    async def mend(self) -> None:
        """Fence, restart and adopt once, if there is anything to do."""
        if not self._has_work():
            return
        try:
            async with self._lock.held(OWNER):
                await self._revive_lost_groups()
                await self._repair.fence_dead()
                await self._repair.restart(self._record.plan())
                await self._repair.adopt_stale(self._server.weight_version)
                await self._server.publish_members()
        except LifecycleError as error:  # another command has the lock for very long
            logger.warning("server %s: %s", self._name, error)

    async def _revive_lost_groups(self) -> None:
        lost, self._lost_groups = self._lost_groups, {}  # the next probe tells who still is
        for name, group in lost.items():
            if group is not self._groups[name]:
                continue  # an answer that came late: another has taken its place already
            try:
                await self._server.revive_group(name)
            except Exception as error:
                logger.error("group %s/%s is lost: %s", self._name, name, describe(error))
        if lost:  # who was not taken over is to be known as dead before the next command
            await self.look()

    async def _wait_for_work(self) -> None:
        """Until there may be something to do: a probe has found it, or a backoff ends."""
        retry_s = self._record.next_retry_s()
        # A timer may be early by a hair; the least wait keeps that from becoming a busy loop.
        wait_s = max(retry_s - _now(), 0.001) if retry_s and retry_s > _now() else None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._work.wait(), wait_s)
        self._work.clear()

    def _has_work(self) -> bool:
        return bool(
            self._lost_groups
            or self._record.unfenced_dead()
            or self._record.plan()
            or (self._has_sources and self._record.stale())
        )

    async def revive(self, groups: Collection[str]) -> None:
        """Start dead engines of groups that could not go on without; backoffs do not count.

        For a caller that holds the lock and to whom the trainer has just given the memory back.
        """
        if self._config.recover and self._record.are_short(groups):
            await self._repair.fence_dead()
            await self._repair.restart(self._record.plan_for_short(groups))


def _now() -> float:
    return asyncio.get_running_loop().time()
