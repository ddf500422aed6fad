"""Probes the engines of a server, and recovers those that die.

Always true:
- a dead engine is out of routing before any other action on it;
- recovery acts on engines of a group only between commands: it holds the server's command lock,
  whose owner is then ``recover``.  An engine boots beside the commands, and joins its group then;
- a failed round is logged, and the next one follows;
- after ``stop``, no probe, restart or task runs.

``rules/health.py`` decides on liveness and restarts, from the state in ``health_tracker.py``.
``actions.py`` carries them out.  This module decides when.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from engines.process.background import Then, keep_task
from engines.protocol.plain_text import describe
from rollout.config import ServerConfig
from rollout.control.group.health_probe import GroupProbe
from rollout.control.group.server_group import ServerGroup
from rollout.control.recovery.actions import RecoveryActions
from rollout.control.recovery.health_tracker import GroupTerms, HealthTracker
from rollout.core.command_lock import CommandLock
from rollout.core.errors import ActorLost, LifecycleError
from rollout.core.fanout import wait_all
from rollout.rules.health import (
    Liveness,
    RecoveryState,
    Restart,
    engines_in,
    is_any_readmission_due,
    next_retry_s,
    plan_for_short,
    plan_recovery,
    unfenced_dead,
)
from rollout.rules.lifecycle import Phase

logger = logging.getLogger(__name__)

OWNER = "recover"
_LISTEN_TIMEOUT_S = 30.0
_PROBE_MARGIN_S = 30.0


Routing = tuple[Mapping[str, tuple[Liveness, str]], Collection[str]]
"""Engines without requests and why, also if their group reports them as serving; and the engines
that recovery may bring back without a command."""


class MonitoredGroups(Protocol):
    """The groups of a server, and those that were seen to be lost; see ``GroupRegistry``."""

    groups: dict[str, ServerGroup]
    lost: dict[str, ServerGroup]


class MonitoredServer(Protocol):
    """The methods of the server that recovery calls."""

    @property
    def base_version(self) -> int: ...
    def phases(self) -> Mapping[str, Phase]: ...
    async def publish_members(self) -> None: ...
    async def note_standbys(self) -> None: ...
    async def replace_lost_group(self, name: str) -> None: ...


class RecoveryMonitor:
    """The background tasks of one server: probe, listen, recover.

    Args:
        router_failures: waits until the router has removed engines from routing, at most this
            long; returns them, with the reason of each.

    Attributes:
        actions: what it does to engines; only for who holds the command lock.
        published: the routing that the router knows, or None if it changed that itself.
    """

    def __init__(
        self,
        name: str,
        config: ServerConfig,
        registry: MonitoredGroups,
        terms: Mapping[str, GroupTerms],
        server: MonitoredServer,
        router_failures: Callable[[float], Awaitable[list[tuple[str, str]]]],
        lock: CommandLock,
    ) -> None:
        self._name = name
        health = self._config = config.health
        self._registry = registry
        self._server = server
        self._router_failures = router_failures
        self._lock = lock
        has_sources = config.weights.store is not None or health.weights_path is not None
        self.tracker = HealthTracker(health, terms, server.phases, _now, has_sources=has_sources)
        self.published: Routing | None = None
        self._probe_now = asyncio.Event()
        self._work = asyncio.Event()
        groups = registry.groups
        self.actions = RecoveryActions(name, health, groups, self.tracker, self._work.set)
        self._task: asyncio.Task[None] | None = None

    # -- start and stop ---------------------------------------------------------------------

    def start(self, engines: Mapping[str, Iterable[str]]) -> None:
        """Start the tasks, if ``health.recover`` is set.

        Args:
            engines: ids of the started engines, by group.
        """
        if self.is_on and self._task is None:
            self.tracker.add_all(engines)
            self._task = keep_task(self._run, f"recovery:{self._name}", Then.STARTS_AGAIN)

    async def stop(self) -> None:
        """Cancel the tasks and the restarts under way; returns when all have ended."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await wait_all([task])
        await self.actions.stop()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for act in (self._watch, self._listen, self._recover):
                tasks.create_task(self._again(act), name=f"recovery:{self._name}:{act.__name__}")

    async def _again(self, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await act()
            except Exception:  # one failed round must not end the task
                logger.exception("server %s: recovery: %s failed", self._name, act.__name__)
                await asyncio.sleep(self._config.probe_interval_s)

    # -- probes -----------------------------------------------------------------------------

    async def _watch(self) -> None:
        # Not ``wait_for``: in Python 3.11 it loses a cancel that comes together with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.probe_interval_s):
                await self._probe_now.wait()
        self._probe_now.clear()
        await self.probe_once()

    async def probe_once(self) -> None:
        """Probe all engines once, and publish changes of routing."""
        before, standbys = self.tracker.snapshot(), dict(self.tracker.standbys)
        probes = await asyncio.gather(*(self._probe(name) for name in self._registry.groups))
        for name, probe in zip(self._registry.groups, probes, strict=True):
            if probe is not None:
                self.tracker.apply_probe(name, probe, before[name])
        if self.tracker.standbys != standbys:
            await self._server.note_standbys()
        if self.routing() != self.published:
            await self._server.publish_members()
        if self._has_work():
            self._work.set()

    async def _probe(self, name: str) -> GroupProbe | None:
        budget_s = self._config.probe_timeout_s
        distrusted = self.tracker.distrusted(name)
        group = self._registry.groups[name]
        try:
            async with asyncio.timeout(2 * budget_s + _PROBE_MARGIN_S):
                return await group.probe(budget_s, distrusted)
        except Exception as error:  # the engines may still be healthy
            if isinstance(error, ActorLost) and error.is_dead:
                self._registry.lost[name] = group
            logger.error("group %s/%s cannot be probed: %s", self._name, name, describe(error))
            return None

    # -- reports of the router --------------------------------------------------------------

    async def _listen(self) -> None:
        for engine_id, reason in await self._router_failures(_LISTEN_TIMEOUT_S):
            # The router has removed it from routing, so publish the members again.
            self.tracker.apply_router_report(engine_id, reason)
            self.published = None
            self._probe_now.set()

    def probe_soon(self) -> None:
        """Probe now, because an engine has failed or changed."""
        self._probe_now.set()

    def routing(self) -> Routing:
        """The engines out of routing and why, and those that may return."""
        returning: set[str] = set()
        if self.is_on:
            returning = self.tracker.may_return(is_checkpoint=self._server.base_version == 0)
        return self.tracker.out_of_routing(), returning

    # -- recovery: fence, restart, readmit --------------------------------------------------

    async def _recover(self) -> None:
        """Recover as soon as a probe finds work, or a backoff ends."""
        retry_s = next_retry_s(self.tracker.groups())
        # A timer may fire a little early; the minimum wait prevents a busy loop.
        wait_s = max(retry_s - _now(), 0.001) if retry_s and retry_s > _now() else None
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._work.wait()
        self._work.clear()
        await self.recover()

    async def recover(self) -> None:
        """Fence engines, begin to boot others, admit and readmit those that can, once."""
        if not self._has_work():
            return
        try:
            async with self._lock.held(OWNER):
                await self.replace_lost_groups()
                await self.actions.fence_dead()
                self.actions.boot(self._plan())
                await self.actions.admit(self._registry.groups)
                await self.actions.readmit_stale(self._server.base_version)
                await self._server.publish_members()
        except LifecycleError as error:  # another command has held the lock for too long
            logger.warning("server %s: %s", self._name, error)

    @property
    def is_on(self) -> bool:
        """Whether what is lost comes back: ``health.recover``."""
        return self._config.recover

    async def replace_lost_groups(self) -> None:
        """Put other groups in the place of those that are lost; the caller holds the lock."""
        if not self.is_on:
            return
        lost = dict(self._registry.lost)
        self._registry.lost.clear()  # the next probe finds those still lost
        for name, group in lost.items():
            if group is not self._registry.groups[name]:
                continue  # a late reply: another group has replaced it already
            try:
                await self._server.replace_lost_group(name)
            except Exception as error:
                logger.error("group %s/%s is lost: %s", self._name, name, describe(error))
        if lost:  # engines that were not reused must be known as dead before the next command
            await self.probe_once()

    def _has_work(self) -> bool:
        groups = self.tracker.groups()
        return bool(
            self._registry.lost
            or unfenced_dead(groups)
            or self._plan()
            or engines_in(RecoveryState.BOOTED, groups)
            or is_any_readmission_due(groups, can_restore=self.tracker.has_sources)
        )

    def _plan(self) -> list[Restart]:
        return plan_recovery(self.tracker.groups(), _now())

    async def restart_if_short(self, groups: Collection[str]) -> None:
        """Restart dead engines of groups that have too few to continue; ignores backoffs.

        The caller holds the lock, and the trainer has just freed the memory.
        """
        health = self.tracker.groups()
        if self._config.recover and any(group.is_short for group in health if group.name in groups):
            await self.actions.fence_dead()
            plan = plan_for_short(self.tracker.groups(), groups)
            self.actions.boot(plan, memory_is_free=True)
            await self.actions.wait_for_boots(groups)
            await self.actions.admit(groups)

    async def readmit_stale(self, version: int) -> None:
        """Let stale engines serve that hold ``version`` or can restore it; the caller holds the
        lock."""
        if self._config.recover:
            await self.actions.readmit_stale(version)


def _now() -> float:
    return asyncio.get_running_loop().time()
