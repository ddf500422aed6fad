"""A door to fake engines in memory, with a router's manners: for tests of drivers and hooks.

Always true: a request goes to the serving engine with the fewest; what a shut door holds is let
in, in order, when it opens; a dead engine is asked once and then no more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from engines.errors import EngineError, EngineRejected, EngineUnreachable
from engines.fake import FakeEngine
from engines.protocol import GenerateReply
from rollout.driver.door import Ask, DoorError, Load, Trouble


class FakeDoor:
    """``driver.door.Door`` over ``engines``; which may be changed while it is used.

    Attributes:
        asks: all that came, in order.
        reports: what was told of steps, in order.
        aborted: rids that were to be aborted, in order.
        is_closed: answers 503 instead of holding.
        weight_version: told with the load.
    """

    def __init__(self, engines: Sequence[FakeEngine]) -> None:
        self.engines = list(engines)
        self.asks: list[Ask] = []
        self.reports: list[Mapping[str, Any]] = []
        self.aborted: list[str] = []
        self.is_closed = False
        self.weight_version: int | None = None
        self._in_flight: Counter[str] = Counter()
        self._open = asyncio.Event()
        self._open.set()
        self._held: dict[str, asyncio.Event] = {}

    def hold(self) -> None:
        """Park what comes from now on."""
        self._open.clear()

    def open(self) -> None:
        """Let in what is parked, and all that comes."""
        self._open.set()

    @property
    def num_in_flight(self) -> int:
        return self._in_flight.total()

    async def generate(self, ask: Ask) -> GenerateReply:
        self.asks.append(ask)
        if self.is_closed:
            raise DoorError("HTTP 503: closed", trouble=Trouble.UNAVAILABLE, retry_after_s=1.0)
        await self._pass(ask.rid)
        serving = [engine for engine in self.engines if not engine.is_dead]
        if not serving:
            raise DoorError("HTTP 503: no engine", trouble=Trouble.UNAVAILABLE, retry_after_s=1.0)
        engine = min(serving, key=lambda one: self._in_flight[one.engine_id])
        self._in_flight[engine.engine_id] += 1
        try:
            return await engine.generate(
                input_ids=ask.input_ids,
                sampling_params=ask.sampling,
                rid=ask.rid,
                return_logprob=True,
            )
        except EngineRejected as error:
            is_final = 400 <= (error.status or 400) < 500
            trouble = Trouble.REFUSED if is_final else Trouble.LOST
            raise DoorError(f"HTTP {error.status}: {error.body}", trouble=trouble) from None
        except EngineUnreachable as error:
            raise DoorError(f"HTTP 502: {error}", trouble=Trouble.LOST) from None
        finally:
            self._in_flight[engine.engine_id] -= 1

    async def abort(self, rids: Sequence[str]) -> None:
        for rid in rids:
            self.aborted.append(rid)
            if rid in self._held:
                self._held[rid].set()
                continue
            for engine in self.engines:
                try:
                    await engine.abort_request(rid)
                except EngineError:
                    continue

    async def report(self, told: Mapping[str, Any]) -> None:
        self.reports.append(told)

    async def load(self) -> Load | None:
        serving = [engine for engine in self.engines if not engine.is_dead]
        return Load(
            num_engines=len(serving),
            num_running=sum(len(engine.in_flight) for engine in serving),
            weight_version=self.weight_version,
        )

    async def close(self) -> None:
        return

    async def _pass(self, rid: str) -> None:
        if self._open.is_set():
            return
        aborted = self._held[rid] = asyncio.Event()
        waits = [asyncio.create_task(self._open.wait()), asyncio.create_task(aborted.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._held[rid]
            for wait in waits:
                wait.cancel()
        if aborted.is_set():
            raise DoorError("HTTP 499: aborted while held", trouble=Trouble.ABORTED)
