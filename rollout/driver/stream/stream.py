"""Sample groups from one source of prompts, batch by batch.

Always true:
- every prompt taken from the source is delivered once, dropped once with a reason, or pending
  (waiting, running or ready); an error or a cancelled call does not change that: a batch is
  delivered last, and one that its call did not return is the next call's;
- interrupted groups go before new ones, and no prompt is taken before its group can begin;
- groups are delivered in the order in which their prompts left the source.

The three modes differ only in ``options.capacity``, and in whether a full batch stops the
rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from engines.process.background import Then, keep_task, start_task
from rollout.core.errors import ConfigError, RolloutError
from rollout.core.samples import Sample, SampleGroup, SampleStatus
from rollout.driver.client.completer import AbortScope, Completer
from rollout.driver.data.plain_values import from_plain
from rollout.driver.data.prompt import Prompt, PromptSource
from rollout.driver.stream.audit import Auditor
from rollout.driver.stream.delivery import (
    BatchTimer,
    check_failures,
    check_rejections,
    is_counted,
    why_wrong_version,
)
from rollout.driver.stream.group_runner import STALE, GroupRunner, Staleness
from rollout.driver.stream.hooks import Hooks, OnSample, post_process
from rollout.driver.stream.journal import SWEEP_S, Journal, JournalFiles
from rollout.driver.stream.options import BatchPlan, RolloutOptions, capacity
from rollout.driver.stream.saved_state import Changes, state_of
from rollout.driver.stream.step_metrics import Progress, StepStats
from rollout.driver.stream.work_queue import WorkItem, WorkQueue
from rollout.driver.user_code import callback, result_now, wrong_result
from rollout.rules.contract import NO_CONTRACT, Contract

logger = logging.getLogger(__name__)

# An abort misses requests that are still on their way to their engine, so it is repeated.
_ABORT_AGAIN_S = (0.1, 0.5)
_CLOSE_TIMEOUT_S = 1.0


class Stream:
    """Batches from one source.

    Args:
        contract: of each request, beside what the options say.
    """

    def __init__(
        self,
        source: PromptSource,
        engines: Completer,
        hooks: Hooks,
        batch: BatchPlan,
        options: RolloutOptions,
        files: JournalFiles | None = None,
        on_loss: Callable[[float], None] = lambda lost_s: None,
        *,
        contract: Contract = NO_CONTRACT,
    ) -> None:
        self.auditor = Auditor()
        self._source = source
        self._engines = engines
        self._hooks = hooks
        self._contract = contract
        self._scope = AbortScope(self._fail)
        self._journal = None if files is None else Journal(files, self._line, on_loss)
        self._writer: asyncio.Task[None] | None = None
        self._queue = WorkQueue()
        self._tasks: dict[int, asyncio.Task[str | None]] = {}
        self._cancelled: set[int] = set()
        self._is_requested = False
        self._is_exhausted = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._checked_version: int | None = None
        self._batch_lock = asyncio.Lock()
        self._timer = BatchTimer(engines.limiter)
        self._runner = GroupRunner(
            engines,
            hooks,
            self._scope,
            batch,
            options,
            self._on_generated,
            self._fail,
            contract,
        )

    # -- batches ----------------------------------------------------------------------------

    @asynccontextmanager
    async def batch(
        self,
        step: int = 0,
        *,
        of: tuple[BatchPlan, RolloutOptions] | None = None,
        on_sample: OnSample | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> AsyncIterator[list[SampleGroup]]:
        """The next batch; it has fewer groups than wanted only at the end of the source.

        It is delivered when the block has ended without an error; else the next call has it.

        Args:
            step: of the trainer; the journal offers its groups again to a trainer that has this
                step, or an earlier one, before it.
            of: its settings, and those of what runs ahead of the batch after it, or None for those
                of the batch before.  A batch that is under way keeps its own.

        Raises:
            RolloutError: too many samples failed, filters dropped too much, or no token has the
                policy's weight version; then its groups are generated again.
            ValueError: pending groups have another size; or the journal does not fit, or does not
                reach back to this step.
            LifecycleError: the gate is closed, and only a push opens it.
            CallEnded: a hook raised ``SystemExit`` or ``KeyboardInterrupt``, or a callback or the
                source anything, which is the cause.
        """
        async with self._batch_lock:
            if of is not None:
                self._use(*of)
            await self._begin_journal(step)
            self._runner.on_sample = on_sample
            wanted = self._engines.weight_version
            await self._fill(on_progress)
            await self._check_version(wanted)
            items = self._queue.first_ready(self._runner.batch.num_groups)
            if self._journal is not None:
                self._journal.note()  # before the caller changes the samples
            yield self._groups(items)
            await self._deliver(items, step)
            self._top_up()

    async def _fill(self, on_progress: Callable[[Progress], None] | None) -> None:
        """Have enough ready groups for a batch."""
        self._runner.stats = self._timer.begin(self._scope)
        self._is_requested = True
        self._scope.reopen()
        has_failed = False
        try:
            self._restart_stale_groups(always=True)
            self._top_up()
            while not self._is_full():
                self._raise_errors()
                self._changed.clear()
                await self._changed.wait()
                if on_progress is not None:
                    with callback("on_progress"):
                        result_now("on_progress", on_progress, self._progress())
                self._restart_stale_groups()
                self._top_up()
            self._timer.end(self.stats, self._scope)
        except Exception:
            has_failed = True
            raise
        finally:
            self._is_requested = False
            if self._runner.options.mode == "sync":
                await self._stop(self._runner.options.abort_timeout_s)
            if has_failed:
                self._error = None  # others of the call that has failed

    def _use(self, batch: BatchPlan, options: RolloutOptions) -> None:
        if batch.group_size != self._runner.batch.group_size and self.pending:
            raise ValueError(
                f"group_size = {batch.group_size}: {len(self.pending)} groups of "
                f"{self._runner.batch.group_size} are pending; take them first"
            )
        self._runner.batch, self._runner.options = batch, options

    @property
    def stats(self) -> StepStats:
        """The counts of the current batch."""
        return self._runner.stats

    @property
    def pending(self) -> list[int]:
        """Serials of the prompts that are taken and not yet delivered or dropped."""
        return [item.serial for item in self._queue.all()]

    def finished(self) -> list[SampleGroup]:
        """Groups of the samples that have ended and have their reward, without any others.

        Filters and ``post_process`` have not changed those of a group that is not ready.
        """
        hooks = self._hooks
        has_reward = hooks.reward is not None or hooks.group_reward is not None
        groups = [
            replace(
                item.group(), samples=list(filter(partial(_is_finished, has_reward), item.samples))
            )
            for item in self._queue.all()
        ]
        return [group for group in groups if group.samples]

    async def close(self) -> None:
        """Abort all requests in flight and stop; everything pending is kept.

        A ``batch`` call that is waiting raises.
        """
        self._is_requested, self._is_closed = False, True
        await self._stop(min(self._runner.options.abort_timeout_s, _CLOSE_TIMEOUT_S))
        await self._cancel(list(self._tasks))
        self._changed.set()
        if self._journal is not None:
            if self._writer is not None:
                self._writer.cancel()
                await asyncio.wait([self._writer])
                self._journal.note()
            await self._journal.close()

    # -- across a restart -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state to continue from, as JSON; groups that are not finished begin again."""
        if self._journal is not None:
            self._journal.begin_file()
        line = self._line(Changes(), -1)
        assert line is not None  # the first one has everything
        return deepcopy(state_of([line]))  # the caller of a batch may change its samples

    def load_state_dict(
        self, state: Mapping[str, Any], batch: BatchPlan, options: RolloutOptions
    ) -> None:
        """Continue from ``state`` with these settings; only before the first batch.

        Raises:
            ValueError: it has groups larger than ``group_size``, it is no such state, or a batch
                was already begun.
        """
        if missing := sorted({"source", "works", "next_serial", "audit"} - state.keys()):
            raise ValueError(
                f"this is no state of a stream: it has no {', '.join(missing)}; give what state_of "
                "returned"
            )
        if self._queue.num_taken or self._tasks:
            raise ValueError("a stream can be restored only before its first batch")
        self._use(batch, options)
        self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        queue = WorkQueue.of_state(state, self._runner.batch.group_size)
        self._source.load_state_dict(from_plain(state["source"]))
        self._queue = queue
        self.auditor.load_state_dict(state["audit"])

    def _line(self, changes: Changes, step: int) -> dict[str, Any] | None:
        """The next line of the saved state."""
        return changes.line(self._source, self._queue, self.auditor, step)

    async def _begin_journal(self, step: int) -> None:
        """Continue from the journal, if it has more than what was restored; then write it."""
        journal = self._journal
        if journal is None or self._writer is not None:
            return
        saved, restored = await journal.read(step), self._queue.num_taken
        if saved.step is not None and saved.step < step:
            if (state := saved.state())["next_serial"] >= restored:
                self._load(state)
        elif saved.step is not None and not restored:
            raise ConfigError(
                f"its groups up to step {saved.step} were delivered and are not in it, so it cannot"
                f" continue with step {step}: restore what state_of returned at that step, or "
                "choose another folder",
                setting="journal",
            )
        self._writer = keep_task(
            partial(self._write_journal, journal), "driver-journal", Then.STARTS_AGAIN
        )

    async def _write_journal(self, journal: Journal) -> None:
        while True:
            journal.note()
            await journal.write()
            await asyncio.sleep(SWEEP_S)

    # -- starting groups --------------------------------------------------------------------

    def _top_up(self) -> None:
        """Begin groups while there is capacity.  ``batch`` raises an error of the source."""
        most = capacity(
            self._runner.options, self._runner.batch.num_groups, is_requested=self._is_requested
        )
        if self._error is not None:
            return
        limit = self._engines.limiter.limit
        while not self._scope.is_stopping and self._queue.may_begin(limit, most):
            item = self._next()
            if item is None:
                return
            self._begin(item)

    def _next(self) -> WorkItem | None:
        while self._queue.waiting:
            item = self._queue.waiting.pop(0)
            if self._runner.restart_if_stale(item) is not Staleness.TOO_OLD:
                return item
            self._drop(item, STALE)
        if self._is_exhausted:
            return None
        name = f"the source of prompt {self._queue.num_taken}"
        try:
            with callback(name):
                prompt = result_now(name, self._source.take)
            if not isinstance(prompt, Prompt | None):
                raise wrong_result(name, self._source.take, prompt, "a Prompt(ids), or None")
        except Exception as error:
            self._fail(error)
            return None
        if prompt is None:
            self._is_exhausted = True
            self._changed.set()
            return None
        item = self._queue.take(prompt, self._runner.batch.group_size)
        self.auditor.take(item.serial)
        return item

    def _begin(self, item: WorkItem) -> None:
        self._queue.begin(item)
        task = start_task(self._runner.run(item), f"group:{item.serial}")
        self._tasks[item.serial] = task
        task.add_done_callback(partial(self._ended, item))

    def _on_generated(self, item: WorkItem) -> None:
        self._queue.has_generated(item)
        if self._scope.is_stopping:
            self._changed.set()
        else:
            self._top_up()

    def _ended(self, item: WorkItem, task: asyncio.Task[str | None]) -> None:
        del self._tasks[item.serial]
        self._queue.end(item)
        outcome: str | None = None
        if task.cancelled():
            if item.serial not in self._cancelled:
                why = f"code of the user has cancelled the driver's task of prompt {item.serial}"
                self._fail(RolloutError(why))
        else:
            error = task.exception()
            if error is not None:
                logger.error("internal error in group %d", item.serial, exc_info=error)
                self._fail(error)
            else:
                outcome = task.result()
        if outcome is None:
            self._requeue(item)
        elif outcome:
            self._drop(item, outcome)
        else:
            self._queue.put_ready(item)
        self._changed.set()
        self._top_up()

    def _fail(self, error: BaseException) -> None:
        """Raise ``error`` from the call for a batch, or from the next one; begin nothing before."""
        self._error = self._error or error
        self._changed.set()

    # -- interrupted, dropped and stale groups ----------------------------------------------

    def _requeue(self, item: WorkItem) -> None:
        if item.num_unfinished and self._scope.is_stopping:
            self.stats.num_parked += item.num_unfinished
            item.num_parked += 1
            if not self._runner.options.partial:
                item.restart(range(len(item.samples)))
        self._queue.requeue(item)

    def _drop(self, item: WorkItem, reason: str) -> None:
        if reason == STALE:
            self.stats.num_stale_dropped += 1
            self.stats.stale_versions.update(v for sample in item.samples for v in sample.versions)
        else:
            self.stats.rejected[reason] += 1
        self.auditor.drop(item.serial, reason)

    def _restart_stale_groups(self, *, always: bool = False) -> None:
        """Check the ready groups, if there is a new weight version."""
        version = self._engines.weight_version
        if version == self._checked_version and not always:
            return
        self._checked_version = version
        for item in list(self._queue.ready.values()):
            staleness = self._runner.restart_if_stale(item)
            if staleness is Staleness.FRESH:
                continue
            del self._queue.ready[item.serial]
            if staleness is Staleness.TOO_OLD:
                self._drop(item, STALE)
            else:
                self._requeue(item)

    # -- finishing a batch ------------------------------------------------------------------

    def _is_full(self) -> bool:
        queue = self._queue
        if len(queue.ready) >= self._runner.batch.num_groups:
            return True
        return self._is_exhausted and not queue.running and not queue.waiting

    def _raise_errors(self) -> None:
        if self._is_closed:
            raise RolloutError("the driver was closed before the batch was full")
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        check_rejections(
            self.stats.rejected,
            self._runner.options.max_rejected,
            num_accepted=len(self._queue.ready),
            num_wanted=self._runner.batch.num_groups,
        )

    async def _check_version(self, wanted: int | None) -> None:
        """Refuse a batch of older weights than the policy's; all ready groups start over."""
        ready = self._queue.ready
        items = [ready[serial] for serial in sorted(ready)[: self._runner.batch.num_groups]]
        samples = [sample for item in items for sample in item.samples]
        versions = [version for sample in samples for version in sample.versions]
        options = self._runner.options
        is_exact = self._contract.weight_version is not None
        if wanted is None or is_exact or max(versions, default=wanted) >= wanted:
            return
        load = await self._engines.load()
        served = None if load is None else load.weight_version
        if why := why_wrong_version(max(versions), wanted, served, options):
            for item in list(ready.values()):
                del ready[item.serial]
                item.restart(range(len(item.samples)))
                self._queue.requeue(item)
            raise RolloutError(why)

    def _groups(self, items: Sequence[WorkItem]) -> list[SampleGroup]:
        """The groups of a batch; ``post_process`` gets copies, because it may be called again."""
        options = self._runner.options
        groups = [item.group() for item in items]
        failures = [failure for item in items for failure in item.failures]
        try:
            check_failures(groups, options, failures)
        except RolloutError:
            self._restart_failed(items)
            raise
        if self._hooks.post_process is not None and groups:
            groups = [replace(group, samples=list(map(_copy_of, group))) for group in groups]
            post_process(self._hooks, groups, lambda *failure: failures.append(failure))
            check_failures(groups, options, failures)
        return groups

    def _restart_failed(self, items: Sequence[WorkItem]) -> None:
        for item in items:
            failed = [
                index
                for index, sample in enumerate(item.samples)
                if is_counted(sample, self._runner.options)
            ]
            if failed:
                del self._queue.ready[item.serial]
                item.restart(failed)
                self._queue.requeue(item)

    async def _deliver(self, items: Sequence[WorkItem], step: int) -> None:
        """Write that these groups are delivered; a call that is cancelled meanwhile keeps them."""
        if self._journal is not None:
            self._journal.note()  # the next line has only that they are delivered
        for item in items:
            del self._queue.ready[item.serial]
            self.auditor.deliver(item.serial)
        if self._journal is None:
            return
        self._journal.note(step)
        try:
            await self._journal.write()
        except BaseException:
            for item in items:
                self._queue.put_ready(item)
                self.auditor.take_back(item.serial)
            raise

    async def _stop(self, timeout_s: float) -> None:
        """Abort all requests and wait until they have ended; rewards may still be computed."""
        self._scope.stop()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        # The prefix names all that have reached the router; a single engine takes only ids.
        rids, prefix, again_s = list[str](), self._scope.prefix, _ABORT_AGAIN_S[0]
        while self._queue.num_unfinished and loop.time() < deadline_s:
            self._changed.clear()
            if self._scope.rids:
                await self._engines.abort(rids, prefix, limit_s=deadline_s - loop.time())
            if self._queue.num_unfinished:
                await self._wait_for_end(loop.time() + again_s)
            rids, prefix, again_s = list(self._scope.rids), "", _ABORT_AGAIN_S[1]
        # Groups that only wait for rewards continue.
        running = self._queue.running
        await self._cancel([serial for serial, item in running.items() if item.num_unfinished])

    async def _wait_for_end(self, until_s: float) -> None:
        try:
            async with asyncio.timeout_at(until_s):
                while self._queue.num_unfinished:
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            pass

    async def _cancel(self, serials: list[int]) -> None:
        tasks = [self._tasks[serial] for serial in serials]
        self._cancelled.update(serials)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._cancelled.difference_update(serials)

    def _progress(self) -> Progress:
        return Progress(
            min(len(self._queue.ready), self._runner.batch.num_groups),
            self._runner.batch.num_groups,
            len(self._queue.running),
            self.stats.rejected.total(),
        )


def _is_finished(has_reward: bool, sample: Sample) -> bool:
    is_rewarded = sample.reward is not None or not has_reward
    return not sample.is_unfinished and sample.status is not SampleStatus.FAILED and is_rewarded


def _copy_of(sample: Sample) -> Sample:
    """A sample whose lists and metadata a hook may change; its lengths may disagree."""
    changed = copy(sample)
    changed.output_ids, changed.output_logprobs = sample.output_ids[:], sample.output_logprobs[:]
    if sample.sampling_mask is not None:
        changed.sampling_mask = sample.sampling_mask[:]
    changed.loss_mask, changed.metadata = sample.mask[:], dict(sample.metadata)
    return changed
