"""The rollout driver: prompts in, sample groups out, in the order of the prompts.

Always true: every prompt is delivered as one group, dropped by a filter or for its age and counted
as dropped, or pending in its stream; without filters, every prompt of a list is delivered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

from pydantic import Field, SkipValidation

from engines.protocol import SamplingParams
from rollout.core.arguments import Count, Positive, Seconds, Share, checked, wrong, wrong_type
from rollout.core.errors import RolloutError, VersionUnavailable
from rollout.core.fanout import run_to_completion
from rollout.core.samples import SampleGroup, all_samples
from rollout.driver.blocking_facade import (
    BlockingFacade,
    arguments_of,
    blocking,
    hiding_nothing,
    started,
)
from rollout.driver.client.completer import Completer
from rollout.driver.client.generation_client import GenerationClient
from rollout.driver.client.http_client import HttpGenerationClient
from rollout.driver.client.limiter import Limiter
from rollout.driver.client.load_follower import LoadFollower
from rollout.driver.client.retry import RetryPolicy
from rollout.driver.data.prompt import Prompt, PromptSource
from rollout.driver.data.prompt_data import FixedPrompts
from rollout.driver.data.saved_groups import RECORD, REPLAY, SavedGroups
from rollout.driver.evaluation import EvalDataset, EvalResult, evaluate_datasets, no_evaluation
from rollout.driver.figures.step_figures import OnMetrics, StepFigures
from rollout.driver.figures.trackers import Trackers, close_trackers, open_trackers
from rollout.driver.logprobs.comparison import Dtype, LogprobReport, compare_logprobs
from rollout.driver.stream.delivery import why_none_left
from rollout.driver.stream.hooks import Hooks, OnSample, Reward
from rollout.driver.stream.journal import JournalFiles, data_name
from rollout.driver.stream.loop_watch import LoopWatch
from rollout.driver.stream.options import BatchPlan, RolloutOptions
from rollout.driver.stream.shown_samples import MOST, shown_samples
from rollout.driver.stream.step_metrics import Progress, length_histogram, step_metrics
from rollout.driver.stream.stream import Stream
from rollout.driver.user_code import result_of
from rollout.rules.diagnosis import JOURNAL_LOST

logger = logging.getLogger(__name__)

OnProgress = Callable[[Progress], None]
_CLOSE_S = 0.5


class RolloutDriver:
    """The driver as coroutines, for callers with their own event loop.

    Args:
        url: of the router, or of one engine.
        reward: called with each completed or truncated sample; sync or async.
        hooks: more callables of the user; ``reward`` overrides theirs.
        max_in_flight: requests at the same time; more wait.
        adapt_every_s: seconds between adaptations of the number in flight to the engines' load,
            up to ``max_in_flight``, or None for no adaptation.
        request_timeout_s: for one completion.
        max_failed_share: a call with a higher share of failed samples raises; ``options``, if
            given, override it.
        lora_path: name of a LoRA adapter for all requests; None: the base; empty: what was pushed
            last.
        routed_experts: samples have ``routed_experts``; the engines must report them.
        sampling_mask: samples have ``sampling_mask``; engines that have none refuse the requests.
        key: the router's ``client_key``, if it has one.
        control_key: the router's, for aborts and metrics; empty: ``key``.
        max_prompt_tokens: a longer prompt in a list raises before generation begins.
        retry_policy: how many failures one sample survives.
        on_metrics: called with the metrics of every rollout and evaluation, in order, in a thread
            of its own; the call may have returned before.  Its errors are logged.
        trackers: where the same figures go, and a table of the shown samples: ``wandb``,
            ``tensorboard``, ``mlflow``, ``trackio``, an object with ``log(figures, step)``, or a
            list of these.  ``{"wandb": {"project": "x"}}`` has the arguments of its run; without
            them an open run is used.  A tracker's first error is logged.
        journal: folder in which finished groups are kept, within 2 s, so that a new launch
            delivers them and generates only the others; for sources, each by its name, and a
            ``rollout_id`` that rises by step.  None keeps none.
        num_shown_samples: samples of each step that the server's page and the report show, from
            the highest reward to the lowest, at most 16; 0 sends none.
        client: used instead of HTTP to ``url``; ``request_timeout_s`` is its limit, too.
        clock: seconds for the use of slots; None: the event loop's.
    """

    @checked
    def __init__(
        self,
        url: str,
        reward: Reward | None = None,
        *,
        hooks: Hooks | None = None,
        max_in_flight: Positive = 512,
        adapt_every_s: Seconds | None = 2.0,
        request_timeout_s: Seconds = 600.0,
        max_failed_share: Share = 0.0,
        max_prompt_tokens: Positive | None = None,
        lora_path: str | None = "",
        routed_experts: bool = False,
        sampling_mask: bool = False,
        key: str = "",
        control_key: str = "",
        retry_policy: RetryPolicy | None = None,
        on_metrics: OnMetrics | None = None,
        trackers: SkipValidation[Trackers] = (),
        num_shown_samples: Annotated[Count, Field(le=MOST)] = 4,
        journal: str | Path | None = None,
        client: SkipValidation[GenerationClient | None] = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if client is None:
            _check_connection(url, key, control_key)
        if clock is None:
            clock = _clock_of_loop()
        hooks = hooks or Hooks()
        self._hooks = hooks if reward is None else replace(hooks, reward=reward)
        self._options = RolloutOptions(max_failed_share=max_failed_share)
        self._max_prompt_tokens = max_prompt_tokens
        self._num_shown_samples = num_shown_samples
        self._replay = SavedGroups.of_environment(REPLAY)
        self._record = SavedGroups.of_environment(RECORD)
        # A replay must leave the journal of the true run as it is.
        self._journal = None if journal is None or self._replay else Path(journal)
        self._step = 0
        limit_s = None if client is None else request_timeout_s  # HTTP keeps its own
        client = client or HttpGenerationClient(
            url,
            timeout_s=request_timeout_s,
            lora_path=lora_path,
            routed_experts=routed_experts,
            sampling_mask=sampling_mask,
            key=key,
            control_key=control_key,
        )
        limiter = Limiter(max_in_flight, clock=clock)
        self._engines = Completer(client, limiter, retry_policy or RetryPolicy(), limit_s)
        self._load = LoadFollower(client, limiter, every_s=adapt_every_s, highest=max_in_flight)
        # By the id of the source, which is not reused because the stream keeps the source.
        self._streams: dict[int, Stream] = {}
        self._lists: set[Stream] = set()
        self._data_names: set[str] = set()
        self._watch = LoopWatch()
        self._is_closed = False
        self._figures = StepFigures(client, on_metrics, open_trackers(trackers))

    async def close(self) -> None:
        """Abort all requests in flight and close the connections, for good, within 5 seconds.

        A hook that does not end then is logged, and left behind.

        Raises:
            Exception: from the client's ``close``.
        """
        self._is_closed = True
        streams = [*self._streams.values(), *self._lists]
        parts = [self._load.close(), self._figures.close(), *(stream.close() for stream in streams)]
        ended = await asyncio.gather(*parts, return_exceptions=True)
        try:
            close = self._engines.client.close
            await result_of("the generation client's close", close, limit_s=_CLOSE_S)
        finally:
            self._watch.close()
            for error in ended:
                if isinstance(error, BaseException):
                    logger.error("a part of the driver could not be closed", exc_info=error)

    async def __aenter__(self) -> RolloutDriver:
        return self

    async def __aexit__(
        self, kind: object, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with hiding_nothing("driver", raised):
            await self.close()

    # -- rollouts ---------------------------------------------------------------------------

    @checked
    async def rollout(
        self,
        rollout_id: Count,
        prompts: SkipValidation[Sequence[Prompt] | PromptSource],
        *,
        group_size: int,
        sampling: SamplingParams,
        num_groups: int | None = None,
        options: RolloutOptions | None = None,
        weight_version: Count | None = None,
        on_sample: OnSample | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[SampleGroup]:
        """The groups of one step.

        Args:
            rollout_id: the step, from 0; kept in each sample's metadata.
            prompts: a list, of which every prompt is returned as a group; or a source, of which the
                next ``num_groups`` are taken.  The driver keeps the source's unfinished groups.
            group_size: samples for each prompt.
            sampling: for each sample.
            num_groups: groups to take from a source; not used with a list.
            options: see ``RolloutOptions``.
            weight_version: the policy's, if the caller knows it: a batch in which no token has it
                raises, unless ``options`` allow older tokens.  Used to find stale samples, too.
            on_sample: called as each sample ends.
            on_progress: called while the batch fills, for a progress bar.

        Raises:
            TypeError, ValueError: no prompt, an empty prompt, or a wrong setting.
            ConfigError: with this sampling no engine reports log-probs that a trainer computes.
            LifecycleError: the gate is closed until a push of a weight version (``expect_version``
                of the launch).
            RolloutError: too many samples failed, or filters dropped too many groups; finished
                groups of a source stay for the next call, and those of a list are the error's
                ``groups``, each with its finished samples and no others.  Or no token has the
                wanted weight version.  Or a hook raised ``SystemExit`` or ``KeyboardInterrupt``,
                or ``on_sample``, ``on_progress`` or the source anything.  What was raised is the
                cause.  Or the driver is closed.
        """
        self._check_open()
        options = self._options if options is None else options
        self._step = rollout_id
        if weight_version is not None:
            self.set_weight_version(weight_version)
        stream, plan = self._stream_for(prompts, num_groups, group_size, sampling, options)
        if self._replay is not None:
            return await self._replayed(self._replay, rollout_id, stream)
        self._load.start()
        self._watch.start()
        if options.max_version_lag is not None:
            await self._refresh()
        batch = stream.batch(
            rollout_id, of=(plan, options), on_sample=on_sample, on_progress=on_progress
        )
        try:
            async with batch as groups:
                if isinstance(prompts, Sequence) and not groups:
                    why = why_none_left(stream.stats, len(prompts), self.weight_version, options)
                    raise RolloutError(why)
                figures = await self._figures_of(rollout_id, groups, stream)
                if self._record is not None:
                    # A write that goes on after a cancel would replace that of the repeated step.
                    write = asyncio.to_thread(self._record.write, rollout_id, groups)
                    await run_to_completion(write)
            self._figures.publish(rollout_id, **figures)
        except RolloutError as error:
            if stream in self._lists:
                error.groups = stream.finished()
            raise
        finally:
            if stream in self._lists:
                await stream.close()
                self._lists.discard(stream)
        return groups  # nothing of a source may be awaited between its delivery and here

    async def _replayed(
        self, saved: SavedGroups, rollout_id: int, stream: Stream
    ) -> list[SampleGroup]:
        """The saved groups of a step; nothing is taken from the prompts, and no hook is called."""
        try:
            groups = await asyncio.to_thread(saved.read, rollout_id)
            figures = await self._figures_of(rollout_id, groups, stream)
        finally:
            self._lists.discard(stream)
        self._figures.publish(rollout_id, **figures)
        return groups

    async def _figures_of(
        self, rollout_id: int, groups: Sequence[SampleGroup], stream: Stream
    ) -> dict[str, Any]:
        for sample in all_samples(groups):
            sample.metadata["rollout_id"] = rollout_id
        metrics = step_metrics(groups, stream.stats, weight_version=self.weight_version)
        return {
            "metrics": {**metrics, **await self._engines.server_metrics()},
            "lengths": length_histogram(list(all_samples(groups))),
            "samples": shown_samples(groups, self._num_shown_samples),
        }

    @checked
    async def evaluate(self, rollout_id: Count, datasets: Mapping[str, EvalDataset]) -> EvalResult:
        """Evaluate every data set; all tokens come from one weight version.

        Args:
            rollout_id: the step, from 0.
            datasets: by the name that their metrics get.

        Raises:
            TypeError, ValueError: a data set has wrong settings.
            LifecycleError: see ``rollout``.
            VersionUnavailable: the engines serve older weights than those of the policy.
            RolloutError: the weight version changed during every try, or the driver is closed.
        """
        self._check_open()
        if self._replay is not None:
            logger.warning("evaluation %d has zeros for figures: no engine runs", rollout_id)
            return no_evaluation(rollout_id, datasets)
        self._load.start()
        self._watch.start()
        served = await self._refresh()
        version = self._engines.weight_version
        if version is not None and served is not None and served < version:
            raise VersionUnavailable(
                f"weight version {version} is to be evaluated, and the engines serve {served}: "
                f"push it first, with push(weights, version={version})",
                weight_version=served,
            )
        result = await evaluate_datasets(rollout_id, datasets, self._engines, self._hooks, version)
        self._figures.publish(rollout_id, result.metrics)
        return result

    @checked
    async def check_logprobs(
        self,
        groups: Sequence[SampleGroup],
        trainer_logprobs: Any,
        *,
        temperature: float = 1.0,
        dtype: Dtype = "bfloat16",
        limit: float | None = None,
        on_mismatch: Literal["warn", "raise"] = "warn",
    ) -> LogprobReport:
        """``rollout.compare_logprobs`` of one step, with its figures on page and metrics.

        Args:
            groups: what ``rollout`` returned.
            trainer_logprobs, temperature, dtype, limit: see ``rollout.compare_logprobs``.
            on_mismatch: ``warn`` logs it; ``raise`` raises it.

        Raises:
            TypeError, ValueError: rows or tokens do not fit the groups, or a wrong setting.
            LogprobMismatch: with ``raise``, after the figures are sent.
            RolloutError: the driver is closed.
        """
        self._check_open()
        report = await asyncio.to_thread(
            compare_logprobs,
            groups,
            trainer_logprobs,
            temperature=temperature,
            dtype=dtype,
            limit=limit,
        )
        steps = (sample.metadata.get("rollout_id", 0) for sample in all_samples(groups))
        self._figures.publish(
            max(steps, default=0), report.metrics(), logprob_gaps=report.histograms
        )
        if report.mismatch is not None and on_mismatch == "warn":
            logger.warning("%s", report.mismatch.why)
        if on_mismatch == "raise":
            report.raise_mismatch()
        return report

    # -- state ------------------------------------------------------------------------------

    @property
    def why_waiting(self) -> str:
        """Why the driver waits: code of the user that stops it; or why requests wait at the
        router's gate or are turned away, as last known; or empty."""
        return self._watch.why_blocked or self._load.why_waiting

    @property
    def weight_version(self) -> int | None:
        """The newest version of the policy that the driver knows."""
        return self._engines.weight_version

    @checked
    def set_weight_version(self, version: Count) -> None:
        """Set the policy's version; one that is older than the known version is ignored.

        The next ``rollout`` raises if the engines serve an older one.

        Args:
            version: from 0.

        Raises:
            TypeError, ValueError: it is no such number.
        """
        self._engines.note_version(version)

    def state_of(self, source: PromptSource) -> dict[str, Any]:
        """The state of source and pending groups, as JSON for ``restore``.

        Those that are not finished begin again from their prompts.

        Args:
            source: one that ``rollout`` was called with.

        Raises:
            ValueError: nothing was rolled out from this source.
        """
        return self.stream_of(source).state_dict()

    def stream_of(self, source: PromptSource) -> Stream:
        """The stream of a source.

        Args:
            source: one that ``rollout`` was called with.

        Raises:
            ValueError: nothing was rolled out from this source.
        """
        if id(source) not in self._streams:
            raise ValueError("nothing was rolled out from this source by this driver")
        return self._streams[id(source)]

    @checked
    def restore(
        self,
        source: SkipValidation[PromptSource],
        state: Mapping[str, Any],
        *,
        num_groups: int,
        group_size: int,
        sampling: SamplingParams,
        options: RolloutOptions | None = None,
    ) -> None:
        """Continue ``source`` from ``state``.

        Args:
            source: the same prompts as those of ``state``; nothing was taken from it.
            state: what ``state_of`` returned.
            num_groups, group_size, sampling, options: see ``rollout``.

        Raises:
            ValueError: the state does not fit the source or the group size.
            RolloutError: the driver is closed.
        """
        self._check_open()
        _check_source("source", source)
        options = self._options if options is None else options
        batch = BatchPlan(num_groups, group_size, sampling)
        self._stream(source, batch, options).load_state_dict(state, batch, options)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RolloutError("this driver is closed: no call is possible after close")

    def _stream_for(
        self,
        prompts: Sequence[Prompt] | PromptSource,
        num_groups: int | None,
        group_size: int,
        sampling: SamplingParams,
        options: RolloutOptions,
    ) -> tuple[Stream, BatchPlan]:
        """The stream of a source, or a new one for a list, and the batch to take of it."""
        _check_prompts(prompts, self._max_prompt_tokens)
        if not isinstance(prompts, Sequence):
            if num_groups is None:
                raise ValueError("num_groups is needed to roll out from a source")
            batch = BatchPlan(num_groups, group_size, sampling)
            return self._stream(prompts, batch, options), batch
        if self._journal is not None:
            raise ValueError(
                "a journal is of sources: give PromptData([...]) instead of a list of prompts"
            )
        batch = BatchPlan(len(prompts), group_size, sampling)
        stream = Stream(FixedPrompts(prompts), self._engines, self._hooks, batch, options)
        self._lists.add(stream)
        return stream, batch

    def _stream(self, source: PromptSource, batch: BatchPlan, options: RolloutOptions) -> Stream:
        stream = self._streams.get(id(source))
        if stream is None:
            files = None if self._journal is None else self._files_of(source, self._journal)
            stream = Stream(
                source, self._engines, self._hooks, batch, options, files, self._report_loss
            )
            self._streams[id(source)] = stream
        return stream

    def _files_of(self, source: PromptSource, journal: Path) -> JournalFiles:
        """The journal's files of a source that is new here, by its name."""
        name = data_name(source)
        if name in self._data_names:
            raise ValueError(
                f"this driver has a data set {name!r} already: use that object again, or give this "
                "one a name of its own, PromptData(name=...)"
            )
        files = JournalFiles(journal / name)
        known = {folder.name for folder in journal.iterdir() if folder.is_dir()}
        others = known - self._data_names - {name}
        if self._step and others and not files.numbers():
            logger.warning(
                "the journal knows %s, and nothing of data set %s, which begins with its first "
                "prompt; if it is one of those, give it their name, PromptData(name=...)",
                ", ".join(sorted(others)),
                name,
            )
        self._data_names.add(name)
        return files

    # -- engines ----------------------------------------------------------------------------

    async def _refresh(self) -> int | None:
        """The weight version that is served, or None if that is not known."""
        load = await self._engines.load()
        served = None if load is None else load.weight_version
        self._engines.note_version(served)
        return served

    def _report_loss(self, lost_s: float) -> None:
        self._figures.publish(self._step, {JOURNAL_LOST: lost_s})


def _check_prompts(prompts: Any, most_tokens: int | None) -> None:
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        _check_source("prompts", prompts, "a list of Prompt, or ")
        return
    if not prompts:
        raise ValueError("rollout needs at least one prompt")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise wrong_type(f"prompts[{index}]", prompt, "a Prompt(ids)")
        if most_tokens is not None and len(prompt.ids) > most_tokens:
            raise ValueError(
                f"prompt {index} has {len(prompt.ids)} tokens, at most {most_tokens} fit"
            )


def _check_source(name: str, source: Any, others: str = "") -> None:
    if not all(hasattr(source, method) for method in ("take", "state_dict", "load_state_dict")):
        raise wrong_type(name, source, f"{others}a source such as PromptData")


def _clock_of_loop() -> Callable[[], float]:
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:
        raise RolloutError(
            "a RolloutDriver needs a running event loop: make it in a coroutine, or use Driver"
        ) from None


def _check_connection(url: str, *keys: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise wrong("url", url, "the http://host:port of a router or an engine, as policy.url")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ValueError("key, control_key: must be printable ASCII text")


class Driver(BlockingFacade[RolloutDriver]):
    """The driver for training loops without an event loop: ``RolloutDriver`` on one of its own.

    Takes the arguments of ``RolloutDriver``, and has its methods with their arguments.  Use it as a
    context manager, or call ``close``.  Hooks and callbacks are called on the driver's thread, and
    one that does not return stops it; ``on_metrics`` has its own.
    """

    @arguments_of(RolloutDriver)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Here, where the program has its open run: MLflow's is that of a thread.
        trackers = open_trackers(kwargs.get("trackers", ()))
        try:
            super().__init__(
                "driver", lambda: RolloutDriver(*args, **{**kwargs, "trackers": trackers})
            )
        except BaseException:
            close_trackers(trackers)
            raise

    rollout = started(RolloutDriver.rollout)
    """Starts ``RolloutDriver.rollout`` and returns a ``Pending`` at once."""
    evaluate = started(RolloutDriver.evaluate)
    """Starts ``RolloutDriver.evaluate`` and returns a ``Pending`` at once."""
    check_logprobs = blocking(RolloutDriver.check_logprobs)
    """``RolloutDriver.check_logprobs``; returns the report itself."""
    set_weight_version = blocking(RolloutDriver.set_weight_version)
    """``RolloutDriver.set_weight_version``."""
    state_of = blocking(RolloutDriver.state_of)
    """``RolloutDriver.state_of``."""
    restore = blocking(RolloutDriver.restore)
    """``RolloutDriver.restore``."""
