"""One group from its prompt through engines, reward and filters, and again if it is stale.

Always true: a sample that was cut off keeps its index; a sample is rewarded once; an exception in
a hook fails its sample and nothing else.  What ends the call leaves the group unfinished, to go on
with the next call.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any

from engines.protocol import SamplingParams
from engines.protocol.logprob_kind import read_kind
from rollout.core.errors import GenerationAborted
from rollout.core.samples import Sample, SampleStatus
from rollout.driver.client.completer import AbortScope, Completer
from rollout.driver.client.session import Session
from rollout.driver.stream.delivery import without_expected
from rollout.driver.stream.hooks import (
    Hooks,
    OnSample,
    apply_group_reward,
    apply_reward,
    generate_with,
    keeps_sample,
    why_dropped,
)
from rollout.driver.stream.options import BatchPlan, RolloutOptions, is_stale
from rollout.driver.stream.step_metrics import StepStats
from rollout.driver.stream.work_queue import WorkItem
from rollout.driver.user_code import CallEnded, callback, result_now
from rollout.rules.contract import Contract

STALE = "stale"
"""The reason for which a group is dropped whose weights are too old."""


class Staleness(Enum):
    """The result of ``GroupRunner.restart_if_stale``."""

    FRESH = auto()
    RESTARTED = auto()
    TOO_OLD = auto()


class GroupRunner:
    """Runs the groups of one stream, which may change the attributes during a run.

    Attributes:
        stats: the counts of the current batch.
        on_sample: called for every sample that is complete and has its reward.

    Args:
        on_generated: called for every sample that needs no engine any more.
        on_ended: called when code of the user has ended the call.
        contract: of each request, beside what the options say.
    """

    def __init__(
        self,
        engines: Completer,
        hooks: Hooks,
        scope: AbortScope,
        batch: BatchPlan,
        options: RolloutOptions,
        on_generated: Callable[[WorkItem], None],
        on_ended: Callable[[CallEnded], None],
        contract: Contract,
    ) -> None:
        self.batch = batch
        self.options = options
        self.stats = StepStats()
        self.on_sample: OnSample | None = None
        self._engines = engines
        self._hooks = hooks
        self._scope = scope
        self._on_generated = on_generated
        self._on_ended = on_ended
        self._contract = contract

    async def run(self, item: WorkItem) -> str | None:
        """None if the group is still unfinished, "" if it is accepted, else why it is dropped."""
        try:
            return await self._run(item)
        except CallEnded as error:
            self._on_ended(error)
            return None

    async def _run(self, item: WorkItem) -> str | None:
        indices = [
            index
            for index, sample in enumerate(item.samples)
            if sample.is_unfinished or index not in item.rewarded
        ]
        if len(indices) == 1:
            await self._run_sample(item, indices[0])
        elif indices:
            async with asyncio.TaskGroup() as tasks:
                for index in indices:
                    tasks.create_task(self._run_sample(item, index))
        if self.restart_if_stale(item) is Staleness.TOO_OLD:
            return STALE
        if item.num_unfinished or not item.rewarded.issuperset(range(len(item.samples))):
            return None
        hooks, note = self._hooks, item.note_failure
        await apply_group_reward(hooks, item.group(), note)
        item.samples = without_expected(item.samples, self.options, self.stats.failed_dropped)
        item.samples = [sample for sample in item.samples if keeps_sample(hooks, sample, note)]
        if not item.samples:
            return "no sample left"
        return why_dropped(hooks, item.group(), note)

    async def _run_sample(self, item: WorkItem, index: int) -> None:
        """Generate and reward a sample; what ends the call does not end the group's others."""
        if item.samples[index].is_unfinished:
            try:
                await self._generate(item, index)
            except CallEnded as error:
                self._on_ended(error)
            self._on_generated(item)
        try:
            await self._reward(item, index)
        except CallEnded as error:
            self._on_ended(error)

    async def _reward(self, item: WorkItem, index: int) -> None:
        sample = item.samples[index]
        if sample.is_unfinished or self._is_stale(sample):
            return
        if index not in item.rewarded:
            await apply_reward(self._hooks, sample, item.note_failure)
            item.rewarded.add(index)
        if self.on_sample is not None:
            with callback("on_sample"):
                result_now("on_sample", self.on_sample, sample)

    async def _generate(self, item: WorkItem, index: int) -> None:
        sample, sampling = item.samples[index], self._sampling(item, index)
        complete = partial(
            self._engines.complete,
            scope=self._scope,
            contract=replace(
                self._contract,
                max_version_lag=self.options.max_version_lag,
                logprob_kind=read_kind(self.options.logprob_kind),
            ),
            may_restart=partial(self._may_restart, item),
            of_hook=self._hooks.generate is not None,
            on_failure=item.note_failure,
        )
        if self._hooks.generate is None:
            await complete(sample, sampling)
            return
        fresh = WorkItem.begin(item.serial, item.prompt, 1).samples[0]
        # Experts are of all tokens that were computed, and are not divided by turns.
        has_turns = bool(sample.output_ids) and sample.routed_experts is None

        is_over = False

        async def beyond_earlier(of: Sample, sampling: SamplingParams, **more: Any) -> None:
            task = asyncio.current_task()
            if is_over or (task is not None and task.cancelling()):  # it swallows its cancel
                raise GenerationAborted("this sample has ended", sample=of)
            item.sessions[index] = session
            await complete(of, sampling, **more)

        earlier, turns = (sample, item.turns.get(index, ())) if has_turns else (None, ())
        session = Session(fresh, sampling, beyond_earlier, earlier, turns)
        if self._scope.is_stopping:
            return
        try:
            await generate_with(self._hooks, session, item.note_failure)
        except (asyncio.CancelledError, CallEnded):
            fresh.status = SampleStatus.ABORTED  # of its last turn it may be another one
            raise
        finally:
            is_over = True
            item.end_session(index, session)

    def _sampling(self, item: WorkItem, index: int) -> SamplingParams:
        sampling = self.batch.sampling
        if sampling.sampling_seed is None:
            return sampling
        seed = seed_of(sampling.sampling_seed, item.serial, index, item.num_redone)
        return replace(sampling, sampling_seed=seed)

    # -- stale samples ----------------------------------------------------------------------

    def restart_if_stale(self, item: WorkItem) -> Staleness:
        """Restart the stale samples of a group, as often as the options allow.

        Returns:
            ``TOO_OLD`` if the group has to be dropped; then nothing was restarted.
        """
        stale = [index for index, sample in enumerate(item.samples) if self._is_stale(sample)]
        if not stale:
            return Staleness.FRESH
        options = self.options
        if item.num_redone >= options.max_redone or options.when_stale == "drop":
            return Staleness.TOO_OLD
        item.num_redone += 1
        self.stats.num_redone += len(stale)
        item.restart(stale)
        return Staleness.RESTARTED

    def _may_restart(self, item: WorkItem) -> bool:
        """Whether a sample with tokens that are too old begins again.  Counts it.

        After too many restarts the sample is completed as it is, and its group is dropped at the
        end.
        """
        if item.num_restarted >= self.options.max_redone * len(item.samples):
            return False
        item.num_restarted += 1
        self.stats.num_redone += 1
        return True

    def _is_stale(self, sample: Sample) -> bool:
        return is_stale(self.options, sample, self._engines.weight_version)


def seed_of(seed: int, serial: int, index: int, num_tries: int) -> int:
    """A different sampling seed for each sample, the same in every run."""
    return zlib.crc32(f"{seed}/{serial}/{index}/{num_tries}".encode()) & 0x7FFF_FFFF
