"""Engines in accelerated time: slots that each make one token per tick, lengths from a trace.

Always true: a slot is busy from a request's admission until its last token or its abort; a sample
has the length that the trace gave it, however often it is cut off and goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engines.protocol import FinishReason, GenerateReply, VersionSpan
from rollout.driver.door import Ask, DoorError, Load, Trouble

MOST_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the engines can do.

    Attributes:
        token_s: seconds of a token, however many slots are busy.
        median_tokens, sigma: of the log-normal lengths, which end at ``MOST_TOKENS``.
    """

    num_engines: int = 8
    num_slots: int = 64
    token_s: float = 0.01
    median_tokens: float = 512.0
    sigma: float = 1.0

    @property
    def slots(self) -> int:
        return self.num_engines * self.num_slots

    def lengths(self, seed: int) -> LengthTrace:
        return LengthTrace(random.Random(seed), self.median_tokens, self.sigma)


class LengthTrace:
    """Lengths of samples, in the order in which they are begun."""

    def __init__(self, rng: random.Random, median: float, sigma: float) -> None:
        self._rng, self._median, self._sigma = rng, median, sigma
        self.num_drawn = 0
        self.num_tokens = 0

    def draw(self) -> int:
        drawn = int(self._median * self._rng.lognormvariate(0.0, self._sigma))
        length = min(MOST_TOKENS, max(1, drawn))
        self.num_drawn += 1
        self.num_tokens += length
        return length


class TraceDoor:
    """``driver.door.Door`` to a fleet; runs on a loop whose time is virtual.

    Attributes:
        busy_s: seconds of all slots in which tokens were made.
    """

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.busy_s = 0.0
        self.trace = fleet.lengths(seed)
        self._fleet = fleet
        self._num_free = fleet.slots
        self._queue: deque[asyncio.Future[None]] = deque()
        self._aborts: dict[str, asyncio.Future[None]] = {}
        self._version = 0
        self._open = asyncio.Event()
        self._open.set()

    async def generate(self, ask: Ask) -> GenerateReply:
        loop = asyncio.get_running_loop()
        aborted = self._aborts[ask.rid] = loop.create_future()
        # The last token of what came so far is the length that the trace gave the sample.
        so_far = len(ask.input_ids) - 1
        length = ask.input_ids[-1] if so_far else self.trace.draw()
        try:
            while not self._open.is_set():
                await self._open.wait()
            await self._enter(aborted)
            num = await self._decode(length - so_far, aborted)
        finally:
            del self._aborts[ask.rid]
        kind = "abort" if so_far + num < length else "stop"
        return GenerateReply(
            rid=ask.rid,
            text="",
            output_ids=(length,) * num,
            output_logprobs=(0.0,) * num,
            finish_reason=FinishReason(kind),
            weight_versions=(VersionSpan(str(self._version), 0, num),) if num else (),
        )

    async def push(self, seconds: float) -> None:
        """Hold what is new, abort what runs, be away for so long, go on with new weights."""
        self._open.clear()
        await self.abort([""])
        await asyncio.sleep(seconds)
        self._version += 1
        self._open.set()

    async def abort(self, rids: Sequence[str]) -> None:
        for begins in rids:
            for rid, aborted in self._aborts.items():
                if rid.startswith(begins):
                    _set(aborted)

    async def load(self) -> Load | None:
        return Load(self._fleet.num_engines, weight_version=self._version)

    async def close(self) -> None:
        return

    async def _enter(self, aborted: asyncio.Future[None]) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        await asyncio.wait([turn, aborted], return_when=asyncio.FIRST_COMPLETED)
        if not turn.done():
            self._queue.remove(turn)
            raise DoorError("aborted while queued", trouble=Trouble.ABORTED)

    async def _decode(self, num: int, aborted: asyncio.Future[None]) -> int:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        timer = loop.call_later(num * self._fleet.token_s, _set, aborted)
        try:
            if not aborted.done():
                await aborted
        finally:
            timer.cancel()
            elapsed_s = loop.time() - began_s
            self.busy_s += elapsed_s
            self._leave()
        return min(num, round(elapsed_s / self._fleet.token_s))

    def _leave(self) -> None:
        if self._queue:
            self._queue.popleft().set_result(None)
        else:
            self._num_free += 1


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
