"""New engines for the fenced ones of a group and for its vacant slots, beside its commands.

Always true: an engine that boots is no engine of its group: no command waits for it or calls it.
It waits until it is admitted, or until its memory is needed: then its process is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from rollout.control.engine.start import Starter
from rollout.control.engine.state import EngineState
from rollout.control.engine.stop import confirm_ended_by_others, confirm_gone
from rollout.control.group.engine_set import EngineSet, as_failure
from rollout.core.errors import LifecycleError, PhaseFailed
from rollout.core.types import EngineSlot


class EngineBoots:
    """The boots of one group, under way or done, by engine id.

    Args:
        is_attached: its engines are started by their owner.
    """

    def __init__(self, engines: EngineSet, starter: Starter, *, is_attached: bool) -> None:
        self._engines = engines
        self._starter = starter
        self._is_attached = is_attached
        self._booting: dict[str, asyncio.Task[EngineState]] = {}
        self._booted: dict[str, EngineState] = {}
        self._is_closed = False

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._booting or engine_id in self._booted

    async def boot(self, engine_id: str) -> bool:
        """Start an engine on a vacant slot, or on that of a fenced one; it waits for ``take``.

        Returns:
            Whether it has booted; otherwise ``end`` was called meanwhile.

        Raises:
            EngineFailure: the old engine may still run, or the new one did not start.
        """
        if engine_id in self._booted:
            return True
        old = self._engines.get(engine_id)
        is_in_use = old is not None and not old.fence_reason
        if self._is_closed or is_in_use or engine_id in self._booting:
            raise LifecycleError(
                f"engine {engine_id} is not fenced, boots already, or its group was stopped"
            )
        started = asyncio.get_running_loop().time()
        boot = asyncio.create_task(
            self._boot(self._engines.slot(engine_id), old), name=f"boot:{engine_id}"
        )
        self._booting[engine_id] = boot
        try:
            await asyncio.wait([boot])
        except asyncio.CancelledError:
            await self.end([engine_id])
            raise
        if self._booting.get(engine_id) is not boot:
            return False
        del self._booting[engine_id]
        if boot.cancelled():
            return False
        if error := boot.exception():
            if not isinstance(error, Exception):
                raise error
            operation = "add" if old is None else "restart"
            raise as_failure(error, engine_id, operation, started) from error
        self._booted[engine_id] = boot.result()
        return True

    async def _boot(self, slot: EngineSlot, old: EngineState | None) -> EngineState:
        kill_timeout_s = self._engines.kill_timeout_s
        async with asyncio.timeout(kill_timeout_s + self._engines.start_budget_s):
            if old is not None and self._is_attached:
                await confirm_ended_by_others(old)
            if old is not None:
                await confirm_gone(old, kill_timeout_s)
            return await self._starter.start(slot)

    def take(self, engine_id: str) -> EngineState | None:
        """The engine that has booted; None if there is none, because its boot was ended."""
        return self._booted.pop(engine_id, None)

    async def end(self, engine_ids: Collection[str] | None = None) -> None:
        """End engines that boot or have booted.

        Args:
            engine_ids: None ends all.

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
                    phase="release",
                )
        for name in names:
            ended, member = self._booting.pop(name, None), self._booted.pop(name, None)
            if ended is not None and not ended.cancelled() and ended.exception() is None:
                member = ended.result()
            if member is not None:
                await self._engines.discard(member)

    async def close(self) -> None:
        """End all of them, and start no other."""
        self._is_closed = True
        await self.end()
