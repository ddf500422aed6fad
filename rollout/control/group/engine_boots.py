"""New engines for the fenced ones of a group and for its vacant slots, beside its commands.

Always true:
- an engine that boots or sleeps is no engine of its group: no command waits for it or calls it;
- it has a slot for itself, or with the engine whose place it will take (a standby);
- one that boots, or has booted and is awake, is ended when its memory is needed.  One that sleeps
  has released its memory, and stays until it is taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from engines.process.background import start_task
from engines.protocol.plain_text import describe
from rollout.config import HealthConfig
from rollout.control.engine.catch_up import put_to_sleep
from rollout.control.engine.memory import EngineMemory, why_no_room_beside
from rollout.control.engine.start import Starter
from rollout.control.engine.state import EngineState
from rollout.control.engine.stop import confirm_gone, discard
from rollout.control.group.engine_set import EngineSet, as_failure
from rollout.control.group.health_probe import has_exited
from rollout.core.errors import EngineFailure, LifecycleError, PhaseFailed
from rollout.core.types import EngineSlot
from rollout.rules.health import backoff_s

logger = logging.getLogger(__name__)

_Task = asyncio.Task[EngineState | None]


@dataclass(eq=False, slots=True)
class _Boot:
    """What boots, has booted or sleeps on one slot.

    Attributes:
        task: starts an engine, or None while none boots.
        ready: the engine that has booted or sleeps, or None if there is none.
        is_awaited: ``boot`` waits for it, in the place of an engine that is fenced or was removed.
    """

    task: _Task | None = None
    ready: EngineState | None = None
    is_awaited: bool = False


class EngineBoots:
    """The engines of one group that boot, have booted or sleep; one record for each slot.

    Args:
        is_attached: its engines are started by their owner.
        is_on_gpus: a boot needs room on GPUs.
    """

    def __init__(
        self,
        engines: EngineSet,
        starter: Starter,
        memory: EngineMemory,
        health: HealthConfig,
        *,
        is_attached: bool,
        is_on_gpus: bool,
    ) -> None:
        self._engines = engines
        self._starter = starter
        self._memory = memory
        self._is_attached = is_attached
        self._is_on_gpus = is_on_gpus
        self._boots = {slot.engine_id: _Boot() for slot in engines.slots}
        self._standby_failures = _StandbyFailures(health)
        self._is_closed = False

    def __contains__(self, engine_id: str) -> bool:
        boot = self._boots[engine_id]
        return boot.task is not None or boot.ready is not None

    @property
    def _ready(self) -> dict[str, EngineState]:
        """The engines that have booted or sleep, by id."""
        return {name: boot.ready for name, boot in self._boots.items() if boot.ready is not None}

    # -- in the place of an engine ------------------------------------------------------------

    async def boot(self, engine_id: str, *, is_lent: bool = False) -> bool:
        """Start an engine on a vacant slot, or on that of a fenced one; it waits for ``take``.

        Where one sleeps on the slot, or boots to sleep there, it is that one.

        Args:
            is_lent: the trainer has the memory: only one that sleeps will do.

        Returns:
            Whether there is one; otherwise ``end`` was called meanwhile, or the trainer has the
            memory.

        Raises:
            EngineFailure: the old engine may still run, or the new one did not start.
        """
        old, boot = self._engines.get(engine_id), self._boots[engine_id]
        is_in_use = old is not None and not old.fence_reason
        if self._is_closed or is_in_use or boot.is_awaited:
            raise LifecycleError(
                f"engine {engine_id} is not fenced, boots already, or its group was stopped"
            )
        started = asyncio.get_running_loop().time()
        boot.is_awaited = True
        try:
            task = boot.task  # of its standby
            if task is None:
                task = self._begin(engine_id, self._restart(engine_id, old, is_lent=is_lent))
            await asyncio.wait([task])
            _has_ended(boot, task)
            if task.cancelled():
                return False
            task.result()
            await self._confirm_gone(old)
        except asyncio.CancelledError:
            await self.end([engine_id])
            raise
        except Exception as error:
            operation = "add" if old is None else "restart"
            raise as_failure(error, engine_id, operation, started) from error
        finally:
            boot.is_awaited = False
        return boot.ready is not None

    def _begin(self, engine_id: str, work: Coroutine[Any, Any, EngineState | None]) -> _Task:
        boot = self._boots[engine_id]
        boot.task = task = start_task(work, f"boot:{engine_id}")
        task.add_done_callback(partial(_has_ended, boot))
        return task

    async def _restart(
        self, engine_id: str, old: EngineState | None, *, is_lent: bool
    ) -> EngineState | None:
        async with asyncio.timeout(self._engines.kill_timeout_s + self._engines.start_budget_s):
            await self._confirm_gone(old)
            ready = self._boots[engine_id].ready
            if ready is not None and await has_exited(ready.process):
                await self._discard_standby(ready)
                ready = None
            if ready is not None or is_lent:
                return ready
            member = await self._starter.start(self._engines.slot(engine_id))
            if self._is_attached:
                member.know_from(old)
            return member

    async def _confirm_gone(self, old: EngineState | None) -> None:
        if old is not None and self._is_attached:
            await self._confirm_ended_by_others(old)
        if old is not None and not old.is_gone:
            await confirm_gone(old, self._engines.kill_timeout_s)

    async def _confirm_ended_by_others(self, old: EngineState) -> None:
        """Check that an attached engine has ended.  We must not kill it, and its state after a
        failure is unknown.

        Raises:
            EngineFailure: it still runs.
        """
        old.fence_cause = old.fence_cause or old.fence_reason
        if why := await self._starter.why_runs(old):
            raise EngineFailure(
                f"engine {old.engine_id} is attached, and {why}; its owner has to restart it "
                f"before it can serve ({old.fence_cause})",
                engine_id=old.engine_id,
                operation="restart",
            )

    def take(self, engine_id: str) -> EngineState | None:
        """The engine that has booted or sleeps there, or None if there is none, or it was ended."""
        boot = self._boots[engine_id]
        ready, boot.ready = boot.ready, None
        return ready

    # -- asleep -------------------------------------------------------------------------------

    def add_sleeping(self, member: EngineState) -> None:
        """Keep an engine that is none of the others: paused, flushed and without its memory."""
        member.is_asleep = True
        self._boots[member.engine_id].ready = member

    def standbys(self) -> frozenset[str]:
        """The slots on which an engine sleeps."""
        return frozenset(name for name, ready in self._ready.items() if ready.is_asleep)

    def sleeping(self) -> list[EngineState]:
        """The engines that sleep beside one that is not fenced."""
        ready = (self._boots[member.engine_id].ready for member in self._engines.unfenced())
        return [standby for standby in ready if standby is not None]

    def standby_state(self, engine_id: str) -> str:
        """The state of the standby engine, as ``EngineStatus.standby`` shows it."""
        boot = self._boots[engine_id]
        if boot.task is not None:
            return "booting"
        if boot.ready is not None:
            return "ready"
        return self._standby_failures.why_none.get(engine_id, "waits to boot")

    async def tend_standbys(self, may_boot: Callable[[], bool]) -> None:
        """Drop standbys that have died, and begin to boot the next one that is missing.

        One boots at a time: the engines of the group serve on the same cores.

        Args:
            may_boot: whether a boot may use memory now.
        """
        for ready in self._ready.values():
            if ready.is_asleep and await has_exited(ready.process):
                await self._discard_standby(ready)
        for member in self._engines.unfenced():
            name = member.engine_id
            if name in self:
                continue
            why = await why_no_room_beside(member) if self._is_on_gpus else ""
            if why:
                self._standby_failures.why_none[name] = why
            is_due = not why and self._standby_failures.may_try()
            is_idle = not any(boot.task for boot in self._boots.values())
            if is_due and may_boot() and is_idle and not self._is_closed:
                self._stand_by(member.slot, member.process_name)

    async def stand_by_first(self) -> None:
        """Boot a standby on each slot, before the engine that will take its memory boots there.

        Raises:
            PhaseFailed: ``close`` was called meanwhile.
        """
        await asyncio.wait([self._stand_by(slot) for slot in self._engines.slots])
        if self._is_closed:
            raise PhaseFailed("its group was stopped while it started", phase="start")

    def _stand_by(self, slot: EngineSlot, name_in_use: str = "") -> _Task:
        task = self._begin(slot.engine_id, self._boot_asleep(slot, name_in_use))
        task.add_done_callback(partial(self._standby_failures.note, slot.engine_id))
        return task

    async def _boot_asleep(self, slot: EngineSlot, name_in_use: str) -> EngineState:
        name = "" if name_in_use else slot.standby_name
        async with asyncio.timeout(self._engines.start_budget_s):
            member = await self._starter.start(slot, name)
            try:
                await put_to_sleep(member, self._memory)
            except BaseException:
                await discard(member)
                raise
        return member

    async def _discard_standby(self, member: EngineState) -> None:
        boot = self._boots[member.engine_id]
        if boot.ready is member:
            boot.ready = None
        logger.warning("engine %s: the process asleep on its slot has ended", member.engine_id)
        await discard(member)

    # -- end ----------------------------------------------------------------------------------

    async def end(
        self, engine_ids: Collection[str] | None = None, *, keeps_asleep: bool = False
    ) -> None:
        """End engines that boot, have booted or sleep.

        Args:
            engine_ids: None ends all.
            keeps_asleep: but those that sleep.

        Raises:
            PhaseFailed: one may still hold memory.
        """
        boots = self._boots
        if engine_ids is not None:
            boots = {name: boots[name] for name in engine_ids if name in boots}
        tasks = {name: boot.task for name, boot in boots.items() if boot.task is not None}
        for task in tasks.values():
            task.cancel()  # a start that is cancelled ends its process
        if tasks:
            _, late = await asyncio.wait(tasks.values(), timeout=self._engines.kill_timeout_s)
            if late:
                raise PhaseFailed(
                    f"{', '.join(tasks)}: a boot did not end within "
                    f"{self._engines.kill_timeout_s:g} s, and may hold memory",
                    phase="release_memory_occupation",
                )
        for name, task in tasks.items():
            _has_ended(boots[name], task)
        for boot in boots.values():
            if boot.ready is not None and not (keeps_asleep and boot.ready.is_asleep):
                ready, boot.ready = boot.ready, None
                await discard(ready)

    async def close(self) -> None:
        """End all of them, and start no other."""
        self._is_closed = True
        await self.end()


def _has_ended(boot: _Boot, task: _Task) -> None:
    if boot.task is task:
        boot.task = None
        if not task.cancelled() and not task.exception() and (ready := task.result()):
            boot.ready = ready


class _StandbyFailures:
    """The boots of standbys that have failed in a row: each makes the wait for the next longer.

    Attributes:
        why_none: why an engine has no standby, by its id.
    """

    def __init__(self, health: HealthConfig) -> None:
        self.why_none: dict[str, str] = {}
        self._health = health
        self._num = 0
        self._retry_at_s = 0.0

    def may_try(self) -> bool:
        """Whether the wait after the last failure is over."""
        return asyncio.get_running_loop().time() >= self._retry_at_s

    def note(self, engine_id: str, task: _Task) -> None:
        """A boot has ended."""
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            self._num = 0
            self.why_none.pop(engine_id, None)
            logger.info("engine %s has a standby", engine_id)
            return
        self._num += 1
        wait_s = backoff_s(self._num, self._health)
        self._retry_at_s = asyncio.get_running_loop().time() + wait_s
        why = f"its standby did not boot: {describe(error)}"
        self.why_none[engine_id] = why
        logger.error("engine %s: %s; the next try is in %g s", engine_id, why, wait_s)
