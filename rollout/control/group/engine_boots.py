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

_Boot = asyncio.Task[EngineState | None]


class EngineBoots:
    """The engines of one group that boot, have booted or sleep, by engine id.

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
        self._booting: dict[str, _Boot] = {}
        self._booted: dict[str, EngineState] = {}
        self._restarting: set[str] = set()
        self._standby_failures = _StandbyFailures(health)
        self._is_closed = False

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._booting or engine_id in self._booted

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
        old = self._engines.get(engine_id)
        is_in_use = old is not None and not old.fence_reason
        if self._is_closed or is_in_use or engine_id in self._restarting:
            raise LifecycleError(
                f"engine {engine_id} is not fenced, boots already, or its group was stopped"
            )
        started = asyncio.get_running_loop().time()
        self._restarting.add(engine_id)
        try:
            boot = self._booting.get(engine_id)  # of its standby
            if boot is None:
                boot = self._begin(engine_id, self._restart(engine_id, old, is_lent=is_lent))
            await asyncio.wait([boot])
            self._has_ended(engine_id, boot)
            if boot.cancelled():
                return False
            boot.result()
            await self._confirm_gone(old)
        except asyncio.CancelledError:
            await self.end([engine_id])
            raise
        except Exception as error:
            operation = "add" if old is None else "restart"
            raise as_failure(error, engine_id, operation, started) from error
        finally:
            self._restarting.discard(engine_id)
        return engine_id in self._booted

    def _begin(self, engine_id: str, work: Coroutine[Any, Any, EngineState | None]) -> _Boot:
        boot = start_task(work, f"boot:{engine_id}")
        self._booting[engine_id] = boot
        boot.add_done_callback(partial(self._has_ended, engine_id))
        return boot

    def _has_ended(self, engine_id: str, boot: _Boot) -> None:
        if self._booting.get(engine_id) is boot:
            del self._booting[engine_id]
            if not boot.cancelled() and not boot.exception() and (member := boot.result()):
                self._booted[engine_id] = member

    async def _restart(
        self, engine_id: str, old: EngineState | None, *, is_lent: bool
    ) -> EngineState | None:
        async with asyncio.timeout(self._engines.kill_timeout_s + self._engines.start_budget_s):
            await self._confirm_gone(old)
            ready = self._booted.get(engine_id)
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
        """The engine that has booted or sleeps there; None if there is none, or it was ended."""
        return self._booted.pop(engine_id, None)

    # -- asleep -------------------------------------------------------------------------------

    def add_sleeping(self, member: EngineState) -> None:
        """Keep an engine that is none of the others: paused, flushed and without its memory."""
        member.is_asleep = True
        self._booted[member.engine_id] = member

    def standbys(self) -> frozenset[str]:
        """The slots on which an engine sleeps."""
        return frozenset(name for name, member in self._booted.items() if member.is_asleep)

    def sleeping(self) -> list[EngineState]:
        """The engines that sleep beside one that is not fenced."""
        names = (one.engine_id for one in self._engines.unfenced())
        return [self._booted[name] for name in names if name in self._booted]

    def standby_state(self, engine_id: str) -> str:
        """As in ``EngineStatus``."""
        if engine_id in self._booting:
            return "booting"
        if engine_id in self._booted:
            return "ready"
        return self._standby_failures.why_none.get(engine_id, "waits to boot")

    async def tend_standbys(self, may_boot: Callable[[], bool]) -> None:
        """Drop standbys that have died, and begin to boot the next one that is missing.

        One boots at a time: the engines of the group serve on the same cores.

        Args:
            may_boot: whether a boot may use memory now.
        """
        for ready in [one for one in self._booted.values() if one.is_asleep]:
            if await has_exited(ready.process):
                await self._discard_standby(ready)
        for member in self._engines.unfenced():
            name = member.engine_id
            if name in self:
                continue
            why = await why_no_room_beside(member) if self._is_on_gpus else ""
            if why:
                self._standby_failures.why_none[name] = why
            is_due = not why and self._standby_failures.may_try()
            if is_due and may_boot() and not (self._booting or self._is_closed):
                self._stand_by(member.slot, member.process_name)

    async def stand_by_first(self) -> None:
        """Boot a standby on each slot, before the engine that will take its memory boots there.

        Raises:
            PhaseFailed: ``close`` was called meanwhile.
        """
        await asyncio.wait([self._stand_by(slot) for slot in self._engines.slots])
        if self._is_closed:
            raise PhaseFailed("its group was stopped while it started", phase="start")

    def _stand_by(self, slot: EngineSlot, name_in_use: str = "") -> _Boot:
        boot = self._begin(slot.engine_id, self._boot_asleep(slot, name_in_use))
        boot.add_done_callback(partial(self._standby_failures.note, slot.engine_id))
        return boot

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
        if self._booted.get(member.engine_id) is member:
            del self._booted[member.engine_id]
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
        known = {*self._booting, *self._booted}
        names = known if engine_ids is None else known.intersection(engine_ids)
        booting = {name: boot for name, boot in self._booting.items() if name in names}
        for boot in booting.values():
            boot.cancel()  # a start that is cancelled ends its process
        if booting:
            _, late = await asyncio.wait(booting.values(), timeout=self._engines.kill_timeout_s)
            if late:
                raise PhaseFailed(
                    f"{', '.join(booting)}: a boot did not end within "
                    f"{self._engines.kill_timeout_s:g} s, and may hold memory",
                    phase="release_memory_occupation",
                )
        for name, boot in booting.items():
            self._has_ended(name, boot)
        for name in names & self._booted.keys():
            if not (keeps_asleep and self._booted[name].is_asleep):
                await discard(self._booted.pop(name))

    async def close(self) -> None:
        """End all of them, and start no other."""
        self._is_closed = True
        await self.end()


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

    def note(self, engine_id: str, boot: _Boot) -> None:
        """A boot has ended."""
        if boot.cancelled():
            return
        if (error := boot.exception()) is None:
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
