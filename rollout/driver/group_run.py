"""One group from its prompt through engines, reward and filters.

Always true: a sample that was cut off stays where it was cut; a sample is judged once; what a hook
raises fails its sample and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from engines.protocol import SamplingParams
from rollout.driver import hooks as hooking
from rollout.driver.completing import Scope
from rollout.driver.hooks import Hooks
from rollout.driver.plan import Freshness, seed_of
from rollout.driver.ports import Engines
from rollout.driver.session import Session
from rollout.driver.work import Work
from rollout.samples import Sample


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a run asks of the stream, where it may change while the run goes on.

    Attributes:
        begins_anew: whether a sample that was cut off is too old to go on.
        is_too_old: whether the whole group is; if not, what is too old of it begins anew.
        has_generated: told of every sample that needs no engine any more.
        has_judged: told of every sample that is whole and has its reward.
    """

    sampling: Callable[[], SamplingParams]
    freshness: Callable[[], Freshness]
    begins_anew: Callable[[Work, Sample], bool]
    is_too_old: Callable[[Work], bool]
    has_generated: Callable[[Work], None]
    has_judged: Callable[[Sample], None]


STALE = "stale"
"""Why a group is dropped whose weights are too old."""


class GroupRun:
    """How groups of one stream are run."""

    def __init__(self, engines: Engines, hooks: Hooks, scope: Scope, outlook: Outlook) -> None:
        self._engines = engines
        self._hooks = hooks
        self._scope = scope
        self._outlook = outlook

    async def run(self, work: Work) -> str | None:
        """None when it stays unfinished, else why it is dropped, or "" when it is accepted."""
        places = [
            place
            for place, sample in enumerate(work.samples)
            if sample.is_unfinished or place not in work.judged
        ]
        if len(places) == 1:
            await self._one(work, places[0])
        elif places:
            async with asyncio.TaskGroup() as tasks:
                for place in places:
                    tasks.create_task(self._one(work, place))
        if self._outlook.is_too_old(work):
            return STALE
        if work.num_unfinished:
            return None
        await hooking.judge_group(self._hooks, work.group())
        work.samples = [one for one in work.samples if hooking.keeps_sample(self._hooks, one)]
        if not work.samples:
            return "no sample left"
        return hooking.why_dropped(self._hooks, work.group())

    async def _one(self, work: Work, place: int) -> None:
        if work.samples[place].is_unfinished:
            await self._generate(work, place)
            self._outlook.has_generated(work)
        sample = work.samples[place]
        if sample.is_unfinished or self._outlook.freshness().is_stale(sample):
            return
        if place not in work.judged:
            await hooking.judge(self._hooks, sample)
            work.judged.add(place)
        self._outlook.has_judged(sample)

    async def _generate(self, work: Work, place: int) -> None:
        sample, sampling = work.samples[place], self._sampling(work, place)
        is_stale = partial(self._outlook.begins_anew, work)
        if self._hooks.generate is None:
            await self._engines.completer.complete(sample, sampling, self._scope, is_stale=is_stale)
            return
        # On a sample of its own: one that is written down or cut off meanwhile begins anew.
        fresh = Work.begin(work.serial, work.prompt, 1).samples[0]
        session = Session(fresh, sampling, self._engines.completer, self._scope, is_stale)
        if not self._scope.is_stopping:
            await hooking.generate_with(self._hooks.generate, session)
        if not fresh.is_unfinished:
            work.samples[place] = fresh

    def _sampling(self, work: Work, place: int) -> SamplingParams:
        sampling = self._outlook.sampling()
        if sampling.sampling_seed is None:
            return sampling
        tries = work.num_redone
        return replace(
            sampling, sampling_seed=seed_of(sampling.sampling_seed, work.serial, place, tries)
        )
