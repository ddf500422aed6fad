"""The rollout driver: prompts in, sample groups out, in the order of the prompts.

Always true: every prompt of a call comes back as one group of exactly ``group_size`` samples,
each with a status; nothing is dropped and nothing is generated twice.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from engines.protocol import SamplingParams
from rollout.driver.client import GenerateClient
from rollout.errors import ConfigError, RolloutError
from rollout.pending import LoopThread, Pending
from rollout.types import Sample, SampleGroup, SampleStatus

Reward = Callable[[Sample], float | Awaitable[float]]
OnSample = Callable[[Sample], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its token ids, and whatever the reward needs to judge the completion."""

    ids: tuple[int, ...]
    metadata: dict[str, Any] = field(default_factory=dict)


class RolloutDriver:
    """The driver as coroutines, for callers with an event loop of their own.

    Args:
        url: the router's.
        reward: called with each completed or truncated sample; sync or async.
        max_in_flight: requests at the same time; further ones wait.
        request_timeout_s: for one completion.
        max_failed_share: a call whose share of failed samples is over this raises.
    """

    def __init__(
        self,
        url: str,
        reward: Reward | None = None,
        *,
        max_in_flight: int = 512,
        request_timeout_s: float = 600.0,
        max_failed_share: float = 0.0,
    ) -> None:
        if max_in_flight < 1:
            raise ConfigError(f"max_in_flight = {max_in_flight}: must be at least 1")
        self._client = GenerateClient(url, max_in_flight=max_in_flight, timeout_s=request_timeout_s)
        self._reward = reward
        self._in_flight = asyncio.Semaphore(max_in_flight)
        self._max_failed_share = max_failed_share

    async def close(self) -> None:
        await self._client.close()

    async def rollout(
        self,
        rollout_id: int,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: SamplingParams,
        on_sample: OnSample | None = None,
    ) -> list[SampleGroup]:
        """Generate ``group_size`` samples for every prompt.

        Args:
            rollout_id: the step; kept in each sample's metadata.
            on_sample: called as each sample ends, for a progress bar.

        Raises:
            ConfigError: no prompt, an empty prompt, or a group size below 1.
            RolloutError: too many samples failed; the message has the first reason.
        """
        if not prompts:
            raise ConfigError("rollout needs at least one prompt")
        if group_size < 1:
            raise ConfigError(f"group_size = {group_size}: must be at least 1")
        for index, prompt in enumerate(prompts):
            if not prompt.ids:
                raise ConfigError(f"prompt {index} has no tokens")

        async def one(prompt: Prompt) -> Sample:
            async with self._in_flight:
                sample = await self._client.sample(
                    prompt.ids, sampling, {**prompt.metadata, "rollout_id": rollout_id}
                )
            await self._judge(sample)
            if on_sample is not None:
                on_sample(sample)
            return sample

        async with asyncio.TaskGroup() as tasks:
            started = [
                [tasks.create_task(one(prompt)) for _ in range(group_size)] for prompt in prompts
            ]
        groups = [
            SampleGroup(index, [task.result() for task in siblings], prompts[index].metadata)
            for index, siblings in enumerate(started)
        ]
        self._check_failures(groups)
        return groups

    async def _judge(self, sample: Sample) -> None:
        if self._reward is None or sample.status in (SampleStatus.FAILED, SampleStatus.ABORTED):
            return
        try:
            reward = self._reward(sample)
            sample.reward = float(await reward if inspect.isawaitable(reward) else reward)
        except Exception as error:  # a reward may raise anything; it fails its sample alone
            sample.status = SampleStatus.FAILED
            sample.error = f"reward raised {error!r}"

    def _check_failures(self, groups: Sequence[SampleGroup]) -> None:
        samples = [sample for group in groups for sample in group.samples]
        failed = [sample for sample in samples if sample.status is SampleStatus.FAILED]
        if len(failed) > self._max_failed_share * len(samples):
            raise RolloutError(
                f"{len(failed)} of {len(samples)} samples failed; the first: {failed[0].error}"
            )


class Driver:
    """The driver for a training loop without an event loop: calls return a ``Pending``.

    Takes the arguments of ``RolloutDriver``; use as a context manager or ``close`` it.
    """

    def __init__(self, url: str, reward: Reward | None = None, **settings: Any) -> None:
        self._loop = LoopThread("rollout-driver")

        async def make() -> RolloutDriver:
            return RolloutDriver(url, reward, **settings)

        try:
            self._driver = self._loop.submit(make()).result()
        except BaseException:
            self._loop.close()
            raise

    def rollout(
        self,
        rollout_id: int,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: SamplingParams,
        on_sample: OnSample | None = None,
    ) -> Pending[list[SampleGroup]]:
        """``RolloutDriver.rollout``, started at once.

        ``on_sample`` and a synchronous reward are called on the driver's thread.
        """
        return self._loop.submit(
            self._driver.rollout(
                rollout_id, prompts, group_size=group_size, sampling=sampling, on_sample=on_sample
            )
        )

    def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        self._loop.submit(self._driver.close()).result()
        self._loop.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
