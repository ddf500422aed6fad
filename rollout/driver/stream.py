"""Sample groups out of one source of prompts, one batch after the other.

Always true:
- every prompt taken from the source is delivered once, dropped once with a reason, or pending:
  under way, ready, or put aside (``pending``); an error or a cancelled call changes nothing of it;
- what was put aside goes before what is new, and nothing is taken that cannot soon be begun;
- groups are delivered in the order in which their prompts left the source.

The three modes differ only in ``plan.capacity`` and in whether a full batch stops the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rollout.driver.aging import Age, begins_anew, renew
from rollout.driver.audit import Auditor
from rollout.driver.completing import Scope
from rollout.driver.counting import Counting
from rollout.driver.delivering import check_failures, check_rejections, post_process, take_back
from rollout.driver.group_run import STALE, GroupRun, Outlook
from rollout.driver.hooks import Hooks, OnSample
from rollout.driver.metrics import StepStats
from rollout.driver.options import Batch, RolloutOptions
from rollout.driver.partial import restart
from rollout.driver.plan import Freshness, Mode, capacity, may_begin
from rollout.driver.ports import Engines, Progress, PromptSource
from rollout.driver.work import Work
from rollout.driver.works import Works
from rollout.errors import ConfigError, RolloutError
from rollout.samples import Sample, SampleGroup

logger = logging.getLogger(__name__)

# A request that was on its way to its engine when the abort came is aborted next time.
_ABORT_AGAIN_S = (0.1, 0.5)
_CLOSE_TIMEOUT_S = 3.0


class Stream:
    """Batches from one source.

    Args:
        auditor: told what becomes of every prompt.
    """

    def __init__(
        self,
        source: PromptSource,
        engines: Engines,
        hooks: Hooks,
        batch: Batch,
        options: RolloutOptions,
        *,
        auditor: Auditor | None = None,
    ) -> None:
        self.auditor = auditor or Auditor()
        self.stats = StepStats()
        self._source = source
        self._engines = engines
        self._hooks = hooks
        self._batch = batch
        self._options = options
        self._scope = Scope()
        self._works = Works()
        self._tasks: dict[int, asyncio.Task[str | None]] = {}
        self._is_asked = False
        self._is_exhausted = False
        self._is_closed = False
        self._broken: BaseException | None = None
        self._changed = asyncio.Event()
        self._checked_version: int | None = None
        self._turn = asyncio.Lock()
        self._on_sample: OnSample | None = None
        self._counting = Counting(engines.limiter)
        outlook = Outlook(
            sampling=lambda: self._batch.sampling,
            freshness=self._freshness,
            begins_anew=self._begins_anew,
            is_too_old=lambda work: self._renew(work) is Age.TOO_OLD,
            has_generated=self._has_generated,
            has_judged=self._has_judged,
        )
        self._runs = GroupRun(engines, hooks, self._scope, outlook)

    # -- batches ----------------------------------------------------------------------------

    async def batch(
        self,
        *,
        on_sample: OnSample | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[SampleGroup]:
        """The next batch: as many groups as are wanted, fewer only when the source ends.

        Raises:
            RolloutError: too many samples failed, or filters dropped too much.
            Exception: what the source raised.
        """
        async with self._turn:
            self._on_sample = on_sample
            self.stats = self._counting.begin(self._scope)
            self._is_asked = True
            self._scope.reopen()
            try:
                self._renew_what_is_stale(always=True)
                self._top_up()
                while not self._is_full():
                    self._raise_what_is_wrong()
                    self._changed.clear()
                    await self._changed.wait()
                    if on_progress is not None:
                        on_progress(self._progress())
                    self._renew_what_is_stale()
                    self._top_up()
                self._counting.end(self.stats, self._scope)
            finally:
                self._is_asked = False
                if self._options.mode is Mode.SYNC:
                    await self._stop(self._options.abort_timeout_s)
            groups = self._deliver()
            self._top_up()
            return groups

    def change(self, batch: Batch, options: RolloutOptions) -> None:
        """Other wishes from the next batch on.

        Raises:
            ConfigError: groups that are under way have another size.
        """
        if batch.group_size != self._batch.group_size and self.pending:
            raise ConfigError(
                f"group_size = {batch.group_size}: {len(self.pending)} groups of "
                f"{self._batch.group_size} are under way; take them first",
                setting="group_size",
                value=batch.group_size,
            )
        self._batch, self._options = batch, options

    @property
    def pending(self) -> list[int]:
        """Serials of the prompts that are taken and not yet delivered or dropped."""
        return [work.serial for work in self._works.all()]

    async def close(self) -> None:
        """Abort what is in flight and stop; everything pending is put aside.

        A batch that is being waited for raises.
        """
        self._is_asked, self._is_closed = False, True
        await self._stop(min(self._options.abort_timeout_s, _CLOSE_TIMEOUT_S))
        await self._cancel(list(self._tasks))
        self._changed.set()

    # -- across a restart -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly here, as JSON has it.

        What is in flight is written down as far as its last reply.
        """
        return {
            "source": dict(self._source.state_dict()),
            **self._works.state_dict(),
            "audit": self.auditor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was written; only before the first batch.

        Raises:
            ConfigError: groups in it have another size than those that are wanted.
        """
        if self._works.num_taken or self._tasks:
            raise ConfigError("a stream is restored before its first batch, not after")
        works = Works.of_state(state, self._batch.group_size)
        self._source.load_state_dict(state["source"])
        self._works = works
        self.auditor.load_state_dict(state["audit"])

    # -- what is begun ----------------------------------------------------------------------

    def _top_up(self) -> None:
        """Begin groups while there is room; an error of the source is told to who waits."""
        options, batch, works = self._options, self._batch, self._works
        most = capacity(
            Mode(options.mode),
            batch.num_groups,
            options.over_sampling,
            options.max_version_lag,
            self._is_asked,
        )
        limit = self._engines.limiter.limit
        while not self._scope.is_stopping and may_begin(
            len(works.under_way), len(works.ready), works.num_unfinished, limit, most
        ):
            work = self._next()
            if work is None:
                return
            self._begin(work)

    def _next(self) -> Work | None:
        while self._works.aside:
            work = self._works.aside.pop(0)
            if self._renew(work) is not Age.TOO_OLD:
                return work
            self._drop(work, STALE)
        if self._broken is not None or self._is_exhausted:
            return None
        try:
            prompt = self._source.take()
        except Exception as error:
            self._broken = error
            self._changed.set()
            return None
        if prompt is None:
            self._is_exhausted = True
            self._changed.set()
            return None
        work = self._works.take(prompt, self._batch.group_size)
        self.auditor.take(work.serial)
        return work

    def _begin(self, work: Work) -> None:
        self._works.begin(work)
        task = asyncio.get_running_loop().create_task(self._runs.run(work))
        self._tasks[work.serial] = task
        task.add_done_callback(partial(self._ended, work))

    def _has_generated(self, work: Work) -> None:
        self._works.has_generated(work)
        if self._scope.is_stopping:
            self._changed.set()
        else:
            self._top_up()

    def _has_judged(self, sample: Sample) -> None:
        if self._on_sample is not None:
            self._on_sample(sample)

    def _ended(self, work: Work, task: asyncio.Task[str | None]) -> None:
        del self._tasks[work.serial]
        self._works.end(work)
        outcome: str | None = None
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                logger.error("group %d failed in the driver itself", work.serial, exc_info=error)
                self._broken = error
            else:
                outcome = task.result()
        if outcome is None:
            self._put_aside(work)
        elif outcome:
            self._drop(work, outcome)
        else:
            self._works.put_ready(work)
        self._changed.set()
        self._top_up()

    # -- what is put aside, dropped, done anew ----------------------------------------------

    def _put_aside(self, work: Work) -> None:
        if work.num_unfinished and self._scope.is_stopping:
            self.stats.num_parked += work.num_unfinished
            work.num_parked += 1
            if not self._options.partial:
                for sample in work.samples:
                    restart(sample)
                work.judged.clear()
        self._works.put_aside(work)

    def _drop(self, work: Work, reason: str) -> None:
        if reason == STALE:
            self.stats.num_stale_dropped += 1
        else:
            self.stats.rejected[reason] += 1
        self.auditor.drop(work.serial, reason)

    def _freshness(self) -> Freshness:
        return Freshness(
            self._engines.weight_version, self._options.max_version_lag, self._options.pin
        )

    def _begins_anew(self, work: Work, sample: Sample) -> bool:
        return begins_anew(work, sample, self._freshness(), self._options, self.stats)

    def _renew(self, work: Work) -> Age:
        return renew(work, self._freshness(), self._options, self.stats)

    def _renew_what_is_stale(self, *, always: bool = False) -> None:
        """Look at what is ready, where a new weight version has been seen."""
        version = self._engines.weight_version
        if version == self._checked_version and not always:
            return
        self._checked_version = version
        for work in list(self._works.ready.values()):
            age = self._renew(work)
            if age is Age.FRESH:
                continue
            del self._works.ready[work.serial]
            if age is Age.TOO_OLD:
                self._drop(work, STALE)
            else:
                self._put_aside(work)

    # -- when a batch is full ---------------------------------------------------------------

    def _is_full(self) -> bool:
        works = self._works
        if len(works.ready) >= self._batch.num_groups:
            return True
        return self._is_exhausted and not works.under_way and not works.aside

    def _raise_what_is_wrong(self) -> None:
        if self._is_closed:
            raise RolloutError("the driver was closed before the batch was full")
        if self._broken is not None:
            error, self._broken = self._broken, None
            raise error
        check_rejections(
            self.stats.rejected,
            self._options.max_rejected,
            num_kept=len(self._works.ready),
            num_wanted=self._batch.num_groups,
        )

    def _deliver(self) -> list[SampleGroup]:
        works = self._works.take_ready(self._batch.num_groups)
        groups = [work.group() for work in works]
        post_process(self._hooks, groups)
        try:
            check_failures(groups, self._options.max_failed_share)
        except RolloutError:
            for work in works:
                if take_back(work):
                    self._works.put_aside(work)
                else:
                    self._works.put_ready(work)
            raise
        for work in works:
            self.auditor.deliver(work.serial)
        return groups

    async def _stop(self, timeout_s: float) -> None:
        """Abort what is in flight until it has ended; rewards may go on."""
        self._scope.stop()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        # One call for all that have reached an engine; what remains was parked or on its way.
        rids, again_s = [self._scope.prefix], _ABORT_AGAIN_S[0]
        while self._works.num_unfinished and loop.time() < deadline_s:
            self._changed.clear()
            if self._scope.rids:
                await self._engines.door.abort(rids)
            if self._works.num_unfinished:
                await self._wait_for_end(loop.time() + again_s)
            rids, again_s = list(self._scope.rids), _ABORT_AGAIN_S[1]
        # What is whole and only waits for its reward goes on.
        under_way = self._works.under_way
        await self._cancel([serial for serial, one in under_way.items() if one.num_unfinished])

    async def _wait_for_end(self, until_s: float) -> None:
        try:
            async with asyncio.timeout_at(until_s):
                while self._works.num_unfinished:
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            pass

    async def _cancel(self, serials: list[int]) -> None:
        tasks = [self._tasks[serial] for serial in serials]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _progress(self) -> Progress:
        return Progress(
            min(len(self._works.ready), self._batch.num_groups),
            self._batch.num_groups,
            len(self._works.under_way),
            self.stats.rejected.total(),
        )
