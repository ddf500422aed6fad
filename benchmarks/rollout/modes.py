"""The same training run in five modes: a naive client, and the modes of the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.rollout.trace import MOST_TOKENS, Fleet, TraceClient
from engines.protocol import SamplingParams
from rollout.driver.client.generation_client import GenerationClient, GenerationRequest
from rollout.driver.data.prompt import Prompt
from rollout.driver.driver import RolloutDriver
from rollout.driver.stream.options import RolloutOptions
from tests.support.virtual_time import VirtualTimeLoop

SAMPLING = SamplingParams(max_new_tokens=MOST_TOKENS)

OPTIONS = {
    "sync": RolloutOptions(),
    "partial": RolloutOptions(over_sampling=2.0),
    "one_ahead": RolloutOptions(mode="one_ahead", over_sampling=1.5),
    "async": RolloutOptions(mode="async", over_sampling=1.5, max_version_lag=4),
}
COLOCATED = ("gather_all", "sync", "partial")


@dataclass(frozen=True, slots=True)
class Run:
    """Size of the training run.

    Attributes:
        num_warm_up: steps before the clock starts, so that the engines are full by then.
        push_s: seconds without engines at each push, in the modes that train while engines
            generate.
        train_share: seconds of a training step, as a share of what a batch takes on engines that
            are never idle.
    """

    num_steps: int
    num_warm_up: int = 4
    num_groups: int = 256
    group_size: int = 8
    push_s: float = 1.0
    train_share: float = 0.9


class Endless:
    """Prompts that never end."""

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> Prompt:
        self._next += 1
        return Prompt((self._next,))

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Any) -> None:
        self._next = state["next"]


Step = Callable[[int], Awaitable[object]]


def in_virtual_time(mode: str, run: Run, fleet: Fleet, seed: int) -> dict[str, float]:
    """Samples per second and busy share, of the time in which the engines serve the rollout."""

    async def measure() -> dict[str, float]:
        client = TraceClient(fleet, seed)
        loop = asyncio.get_running_loop()
        train_s = run.train_share * batch_s(run, fleet, seed)
        busy_s = engine_s = 0.0
        async with training(mode, run, client, fleet.slots) as step:
            for number in range(run.num_warm_up + run.num_steps):
                began_s, before_s = loop.time(), client.busy_s
                await step(number)
                if mode not in COLOCATED:
                    await asyncio.sleep(train_s)
                    await client.push(run.push_s)
                if number >= run.num_warm_up:
                    busy_s += client.busy_s - before_s
                    engine_s += loop.time() - began_s
        num_samples = run.num_steps * run.num_groups * run.group_size
        return {
            "samples_per_s": num_samples / engine_s,
            "engine_busy": busy_s / (fleet.slots * engine_s),
        }

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(measure())


@cache
def mean_tokens(fleet: Fleet, seed: int) -> float:
    """Mean length of a sample, over a long stretch of the trace."""
    trace = fleet.lengths(seed)
    for _ in range(200_000):
        trace.draw()
    return trace.num_tokens / trace.num_drawn


def batch_s(run: Run, fleet: Fleet, seed: int) -> float:
    """Seconds of one batch on engines that are never idle."""
    tokens = run.num_groups * run.group_size * mean_tokens(fleet, seed)
    return tokens * fleet.token_s / fleet.slots


class training:
    """One training run in a mode; ``async with training(...) as step: await step(number)``.

    Args:
        max_in_flight: the driver's limit; the naive client has none.
    """

    def __init__(self, mode: str, run: Run, client: GenerationClient, max_in_flight: int) -> None:
        self._mode, self._run, self._client = mode, run, client
        self._source = Endless()
        self._driver = RolloutDriver(
            "", client=client, max_in_flight=max_in_flight + 64, adapt_every_s=None
        )

    async def __aenter__(self) -> Step:
        return self._gather_all if self._mode == "gather_all" else self._rollout

    async def __aexit__(self, *_: object) -> None:
        await self._driver.close()

    async def _rollout(self, number: int) -> object:
        return await self._driver.rollout(
            number,
            self._source,
            num_groups=self._run.num_groups,
            group_size=self._run.group_size,
            sampling=SAMPLING,
            options=OPTIONS[self._mode],
        )

    async def _gather_all(self, number: int) -> object:
        """Send all requests at once and wait for all replies, as a naive client does."""
        requests = [
            GenerationRequest(f"{number}/{prompt}/{sibling}", [prompt], SAMPLING)
            for prompt in range(self._run.num_groups)
            for sibling in range(self._run.group_size)
        ]
        return await asyncio.gather(*(self._client.generate(request) for request in requests))
