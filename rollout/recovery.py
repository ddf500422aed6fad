"""Watch the engines of a server, and bring back those that die.

Always true:
- a dead engine is out of routing before anything else is done about it;
- it is killed, and its group made to forget it, only between commands: under the server's command
  lock, whose owner is then ``recover``;
- a round that goes wrong is logged and the next one comes all the same;
- ``stop`` leaves no probe, no restart and no task behind.

What to think of an engine, and whom to start again when, is decided in ``health.py``; what an
engine is asked, in its group.  Here is only the order in which that is done.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rollout.config import HealthConfig
from rollout.errors import LifecycleError
from rollout.fanout import describe, settle
from rollout.health import (
    EngineHealth,
    Finding,
    GroupHealth,
    Restart,
    State,
    Verdict,
    due,
    memory_is_ours,
    next_retry_s,
    out_of_routing,
    plan_recovery,
    spared,
    verdict,
)
from rollout.lifecycle import Phase
from rollout.lock import CommandLock
from rollout.watching import GroupProbe

logger = logging.getLogger(__name__)

OWNER = "recover"
# A group bounds its own probes and restarts; past this much more, the group itself is lost.
_GROUP_MARGIN_S = 30.0
_KILL_TIMEOUT_S = 40.0
_LISTEN_TIMEOUT_S = 30.0


class RecoverableGroup(Protocol):
    """What recovery asks of a group, here or in an actor."""

    def probe(self, budget_s: float, distrusted: Sequence[str] = ()) -> Awaitable[GroupProbe]: ...
    def fence(self, engine_id: str, reason: str) -> Awaitable[None]: ...
    def restart(self, engine_id: str) -> Awaitable[None]: ...
    def adopt(self, engine_id: str, version: int) -> Awaitable[bool]: ...


class FailureSource(Protocol):
    """Who sees requests fail: the router."""

    def failures(self, timeout_s: float) -> Awaitable[list[tuple[str, str]]]:
        """Engines that were taken out of routing since the last call, and why.

        Returns when there is one, or empty after ``timeout_s``.
        """
        ...


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """What of a group's configuration bears on recovery.

    Attributes:
        has_processes: its engines are launched by us, and may be killed.
        start_timeout_s: what one of them gets to start.
    """

    needs_offload: bool
    min_engines: int
    has_processes: bool = True
    start_timeout_s: float = 300.0
    adopt_timeout_s: float = 600.0


class Server(Protocol):
    """What recovery asks of the server it belongs to."""

    @property
    def weight_version(self) -> int:
        """The version published last."""
        ...

    def phases(self) -> Mapping[str, Phase]:
        """Where each group is."""
        ...

    async def publish_members(self) -> None:
        """Tell the router who serves; it asks ``Recovery.out_of_routing`` among others."""
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
    ) -> None:
        self._name = name
        self._config = config
        self._groups = dict(groups)
        self._terms = dict(terms)
        self._server = server
        self._router = router
        self._lock = lock
        self._engines: dict[str, dict[str, EngineHealth]] = {group: {} for group in groups}
        self._published: dict[str, tuple[Verdict, str]] | None = None
        self._look_now = asyncio.Event()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- start and stop ---------------------------------------------------------------------

    def start(self, engines: Mapping[str, Iterable[str]]) -> None:
        """Begin to watch, if the configuration wants that.

        Args:
            engines: ids of those that have just been started, by group.
        """
        if self._config.recover and self._task is None:
            for group, ids in engines.items():
                self._engines[group] = {one: EngineHealth(since_s=_now()) for one in ids}
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
        before = {name: dict(engines) for name, engines in self._engines.items()}
        probes = await asyncio.gather(*(self._probe(name) for name in self._groups))
        for name, probe in zip(self._groups, probes, strict=True):
            if probe is not None:
                self._take_in(name, probe, before[name])
        await self._publish_if_changed()
        if self._has_work():
            self._work.set()

    async def _probe(self, name: str) -> GroupProbe | None:
        budget_s = self._config.probe_timeout_s
        distrusted = [one for one, now in self._engines[name].items() if now.streaks.reports]
        try:
            async with asyncio.timeout(2 * budget_s + _GROUP_MARGIN_S):
                return await self._groups[name].probe(budget_s, distrusted)
        except Exception as error:  # it says nothing about the engines
            logger.error("group %s/%s cannot be probed: %s", self._name, name, describe(error))
            return None

    def _take_in(self, group: str, probe: GroupProbe, before: Mapping[str, EngineHealth]) -> None:
        engines = self._engines[group]
        now_s = _now()
        for one in probe.engines:
            health = engines.setdefault(one.engine_id, EngineHealth(since_s=now_s))
            if one.engine_id in before and not health.is_same_life(before[one.engine_id]):
                continue  # it was replaced meanwhile: this is about the old one
            finding = one.finding
            if finding is Finding.FAILED and not probe.is_steady:
                finding = Finding.ASLEEP  # a command ran: it had better things to do
            health = health.after(finding, self._config)
            if health.state is State.STALE and not one.is_stale and finding is not Finding.FENCED:
                logger.info("engine %s has the published weights again", one.engine_id)
                health = health.proved(now_s)
            engines[one.engine_id] = health
            self._judge(group, one.engine_id, one.said)

    def _judge(self, group: str, engine_id: str, said: str) -> None:
        health = self._engines[group][engine_id]
        can_spare = spared(engine_id, self._engines[group], self._terms[group].min_engines)
        is_dead = verdict(health.streaks, self._config, can_spare=can_spare) is Verdict.DEAD
        if is_dead and not health.is_out:
            because = f"engine {engine_id} is dead: {said or 'the router lost it too often'}"
            logger.error("%s", because, extra={"engine_id": engine_id})
            self._engines[group][engine_id] = health.died(because, _now(), self._config)

    # -- listen: what the router reports ----------------------------------------------------

    async def _listen(self) -> None:
        for engine_id, because in await self._router.failures(_LISTEN_TIMEOUT_S):
            self._report(engine_id, because)

    def _report(self, engine_id: str, because: str) -> None:
        """The router lost a request to this engine and sends it nothing more for now."""
        for group, engines in self._engines.items():
            if engine_id in engines:
                engines[engine_id] = engines[engine_id].after(Finding.REPORTED, self._config)
                self._judge(group, engine_id, because)
        self._published = None  # the router has taken it out by itself, and must hear how it is
        self._look_now.set()

    def look_soon(self) -> None:
        """Something went wrong with an engine: do not wait for the next probe."""
        self._look_now.set()

    # -- routing ----------------------------------------------------------------------------

    def out_of_routing(self) -> dict[str, tuple[Verdict, str]]:
        """Engines that get no requests whatever their group says, and why."""
        out: dict[str, tuple[Verdict, str]] = {}
        for group in self._looked_at():
            out |= out_of_routing(group, self._config)
        return out

    def has_published(self, out: dict[str, tuple[Verdict, str]]) -> None:
        """The router has been told."""
        self._published = out

    async def _publish_if_changed(self) -> None:
        if self.out_of_routing() != self._published:
            await self._server.publish_members()

    def _looked_at(self) -> list[GroupHealth]:
        phases = self._server.phases()
        return [
            GroupHealth(
                name=name,
                phase=phases[name],
                needs_offload=self._terms[name].needs_offload,
                min_engines=self._terms[name].min_engines,
                max_restarts=self._max_restarts(name),
                engines=engines,
            )
            for name, engines in self._engines.items()
        ]

    def _max_restarts(self, group: str) -> float:
        """Whoever launched an attached engine may bring it back at any time."""
        return self._config.max_restarts if self._terms[group].has_processes else math.inf

    # -- mend: fence, restart, adopt --------------------------------------------------------

    async def _mend(self) -> None:
        await self._wait_for_work()
        if not self._has_work():
            return
        try:
            async with self._lock.held(OWNER):
                await self._fence_dead()
                await self._restart(plan_recovery(self._looked_at(), _now(), self._config))
                await self._adopt_stale()
                await self._server.publish_members()
        except LifecycleError as error:  # another command has the lock for very long
            logger.warning("server %s: %s", self._name, error)

    async def _wait_for_work(self) -> None:
        """Until there may be something to do: a probe has found it, or a backoff ends."""
        retry_s = next_retry_s(self._looked_at())
        # A timer may be early by a hair; the least wait keeps that from becoming a busy loop.
        wait_s = max(retry_s - _now(), 0.001) if retry_s and retry_s > _now() else None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._work.wait(), wait_s)
        self._work.clear()

    def _has_work(self) -> bool:
        return bool(
            self._unfenced_dead()
            or plan_recovery(self._looked_at(), _now(), self._config)
            or (self._config.weights_path is not None and self._stale())
        )

    async def revive(self, groups: Collection[str]) -> None:
        """Start dead engines of groups that could not go on without; backoffs do not count.

        For a caller that holds the lock and to whom the trainer has just given the memory back.
        """
        if self._task is None:
            return
        short = [
            group
            for group in self._looked_at()
            if group.name in groups and group.num_up < group.min_engines
        ]
        if short:
            await self._fence_dead()
            await self._restart(
                [
                    Restart(group.name, one)
                    for group in short
                    for one in due(group, math.inf)[: self._config.max_parallel_restarts]
                ]
            )

    def _unfenced_dead(self) -> list[tuple[str, str]]:
        return [
            (group, engine_id)
            for group, engines in self._engines.items()
            for engine_id, one in engines.items()
            if one.state is State.DEAD and not one.is_fenced
        ]

    async def _fence_dead(self) -> None:
        """End dead engines now, whether or not they may be started again yet."""
        await self._at_once(self._fence(*one) for one in self._unfenced_dead())

    async def _fence(self, group: str, engine_id: str) -> None:
        health = self._engines[group][engine_id]
        because = health.because
        if health.is_given_up(self._max_restarts(group)):
            because = f"{because} (given up after {health.num_restarts} restarts)"
            logger.error("%s", because, extra={"engine_id": engine_id})
        async with asyncio.timeout(_KILL_TIMEOUT_S):
            await self._groups[group].fence(engine_id, because)
        self._engines[group][engine_id] = replace(health, is_fenced=True)

    async def _restart(self, plan: Iterable[Restart]) -> None:
        await self._at_once(self._start_again(one.group, one.engine_id) for one in plan)

    async def _start_again(self, group: str, engine_id: str) -> None:
        engines, terms = self._engines[group], self._terms[group]
        if terms.has_processes:
            budget_s = terms.start_timeout_s + 2 * _GROUP_MARGIN_S
        else:  # it is there or it is not: nothing is worth holding the lock for
            budget_s = 2 * self._config.probe_timeout_s
        engines[engine_id] = engines[engine_id].restarting(_now())
        try:
            async with asyncio.timeout(budget_s):
                await self._groups[group].restart(engine_id)
        except Exception as error:
            self._has_died(group, engine_id, "could not be started again", error)
            return
        elapsed_s = _now() - engines[engine_id].since_s
        engines[engine_id] = engines[engine_id].started(_now())
        logger.info("engine %s was started again in %.1f s", engine_id, elapsed_s)

    def _stale(self) -> list[tuple[str, str]]:
        """Stale engines that might be given their weights now."""
        return [
            (group.name, engine_id)
            for group in self._looked_at()
            if memory_is_ours(group)
            for engine_id, one in group.engines.items()
            if one.state is State.STALE
        ]

    async def _adopt_stale(self) -> None:
        await self._at_once(self._adopt(*one) for one in self._stale())

    async def _adopt(self, group: str, engine_id: str) -> None:
        engines = self._engines[group]
        version = self._server.weight_version
        try:
            async with asyncio.timeout(self._terms[group].adopt_timeout_s):
                serves = await self._groups[group].adopt(engine_id, version)
        except Exception as error:
            self._has_died(group, engine_id, f"could not be given weight version {version}", error)
            return
        if serves:
            engines[engine_id] = engines[engine_id].proved(_now())
            logger.info("engine %s serves again at weight version %d", engine_id, version)

    def _has_died(self, group: str, engine_id: str, what: str, error: Exception) -> None:
        because = f"engine {engine_id} {what}: {describe(error)}"
        logger.error("%s", because, extra={"engine_id": engine_id})
        health = self._engines[group][engine_id]
        self._engines[group][engine_id] = health.died(because, _now(), self._config)
        self._work.set()

    async def _at_once(self, acts: Iterable[Coroutine[Any, Any, None]]) -> None:
        """All at the same time; one that fails is told and hinders no other."""

        async def tell(act: Coroutine[Any, Any, None]) -> None:
            try:
                await act
            except Exception as error:
                logger.error("server %s: recovery: %s", self._name, describe(error))

        # Cancelled, it cancels them all: what they were starting is ended.
        async with asyncio.TaskGroup() as tasks:
            for act in acts:
                tasks.create_task(tell(act))


def _now() -> float:
    return asyncio.get_running_loop().time()
