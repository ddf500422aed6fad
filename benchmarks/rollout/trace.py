"""Engines in virtual time: each slot makes one token per tick; lengths come from a trace.

Always true: a slot is busy from a request's admission until its last token or its abort; a sample
has the length that the trace gave it, however often it is aborted and continued.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.protocol import FinishReason, GenerateReply, VersionSpan
from rollout.driver.client.generation_client import (
    EngineLoad,
    FailureKind,
    GenerationError,
    GenerationRequest,
)

MOST_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Fleet:
    """Size and speed of the engines, and the lengths of samples.

    Attributes:
        token_s: seconds per token, however many slots are busy.
        median_tokens, sigma: of the log-normal lengths, which are cut at ``MOST_TOKENS``.
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
    """Lengths of samples, in the order in which the samples begin."""

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


class TraceClient:
    """``GenerationClient`` to a fleet, on an event loop whose time is virtual.

    Attributes:
        busy_s: seconds in which slots made tokens, summed over the slots.
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

    async def generate(self, request: GenerationRequest) -> GenerateReply:
        loop = asyncio.get_running_loop()
        aborted = self._aborts[request.rid] = loop.create_future()
        # Every token of a sample is its length, so a continued sample brings its length along.
        so_far = len(request.input_ids) - 1
        length = request.input_ids[-1] if so_far else self.trace.draw()
        try:
            while not self._open.is_set():
                await self._open.wait()
            await self._enter(aborted)
            num = await self._decode(length - so_far, aborted)
        finally:
            del self._aborts[request.rid]
        kind = "abort" if so_far + num < length else "stop"
        return GenerateReply(
            rid=request.rid,
            text="",
            output_ids=(length,) * num,
            output_logprobs=(0.0,) * num,
            finish_reason=FinishReason(kind),
            weight_versions=(VersionSpan(str(self._version), 0, num),) if num else (),
        )

    async def push(self, seconds: float) -> None:
        """Hold new requests, abort running ones, pause for ``seconds``, then serve new weights."""
        self._open.clear()
        for aborted in self._aborts.values():
            _set(aborted)
        await asyncio.sleep(seconds)
        self._version += 1
        self._open.set()

    async def abort(self, rids: Sequence[str], *, prefix: str = "") -> None:
        for rid, aborted in self._aborts.items():
            if rid in rids or (prefix and rid.startswith(prefix)):
                _set(aborted)

    async def load(self) -> EngineLoad | None:
        return EngineLoad(self._fleet.num_engines, weight_version=self._version)

    async def server_metrics(self) -> Mapping[str, float]:
        return {}

    async def report(self, _figures: Mapping[str, Any]) -> None:
        """Discard the figures; this benchmark has its own."""

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
            raise GenerationError("aborted while queued", kind=FailureKind.ABORTED)

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
