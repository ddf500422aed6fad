"""The rollout driver: prompts in, sample groups out, in the order of the prompts.

Always true: every prompt is delivered as one group, dropped by a filter or for its age and counted
as that, or still pending in its stream; a list of prompts without filters comes back whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engines.protocol import SamplingParams
from rollout.driver.completing import Completer
from rollout.driver.concurrency import Bounds, next_limit
from rollout.driver.door import Door
from rollout.driver.evaluation import EvalDataset, EvalResult, evaluated
from rollout.driver.hooks import Hooks, OnSample, Reward
from rollout.driver.http_door import HttpDoor
from rollout.driver.limiter import Limiter
from rollout.driver.metrics import length_histogram, step_metrics
from rollout.driver.options import Batch, RolloutOptions
from rollout.driver.ports import Engines, Progress, PromptSource
from rollout.driver.prompts import Prompt as Prompt
from rollout.driver.retry import Patience
from rollout.driver.sources import Fixed
from rollout.driver.stream import Stream
from rollout.errors import ConfigError, RolloutError
from rollout.pending import LoopThread, Pending
from rollout.samples import SampleGroup, all_samples, version_number

logger = logging.getLogger(__name__)

OnMetrics = Callable[[int, Mapping[str, float]], None]
OnProgress = Callable[[Progress], None]
_DEFAULT_OPTIONS = RolloutOptions()


class RolloutDriver:
    """The driver as coroutines, for callers with an event loop of their own.

    Args:
        url: the router's.
        reward: called with each completed or truncated sample; sync or async.
        hooks: more callables of the user; ``reward`` goes before theirs.
        max_in_flight: requests at the same time; further ones wait.
        adapt_every_s: how often the number in flight follows the engines' load, up to
            ``max_in_flight``; None leaves it there.
        request_timeout_s: for one completion.
        max_failed_share: a call whose share of failed samples is over this raises; where
            ``options`` are given, theirs counts.
        lora_path: name of the LoRA adapter that everything is generated with; None: the base.
        key: the router's ``client_key``, where it has one.
        control_key: the router's, for aborts and figures; left out: ``key``.
        max_prompt_tokens: a longer prompt in a list raises before anything is generated.
        patience: how much one sample may go through before it fails.
        on_metrics: told the figures of every rollout and evaluation.
        door: in the place of HTTP to ``url``.
        clock: seconds that slots are counted in; the event loop's if left out.
    """

    def __init__(
        self,
        url: str,
        reward: Reward | None = None,
        *,
        hooks: Hooks | None = None,
        max_in_flight: int = 512,
        adapt_every_s: float | None = 2.0,
        request_timeout_s: float = 600.0,
        max_failed_share: float = 0.0,
        max_prompt_tokens: int | None = None,
        lora_path: str | None = None,
        key: str = "",
        control_key: str = "",
        patience: Patience | None = None,
        on_metrics: OnMetrics | None = None,
        door: Door | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if max_in_flight < 1:
            raise ConfigError(f"max_in_flight = {max_in_flight}: must be at least 1")
        given = hooks or Hooks()
        self._hooks = given if reward is None else replace(given, reward=reward)
        self._options = replace(_DEFAULT_OPTIONS, max_failed_share=max_failed_share)
        self._bounds = Bounds(highest=max_in_flight)
        self._adapt_every_s = adapt_every_s
        self._most = max_prompt_tokens
        self._on_metrics = on_metrics
        door = door or HttpDoor(
            url,
            timeout_s=request_timeout_s,
            lora_path=lora_path,
            key=key,
            control_key=control_key,
        )
        limiter = Limiter(max_in_flight, clock=clock or asyncio.get_running_loop().time)
        completer = Completer(door, limiter, patience or Patience(), on_version=self._saw_version)
        self._engines = Engines(door, limiter, completer)
        self._streams: dict[int, tuple[PromptSource, Stream]] = {}
        self._lists: set[Stream] = set()
        self._watching: asyncio.Task[None] | None = None
        self._reporting: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Abort what is in flight and close the connections."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._reporting:  # each has a deadline of its own
            await asyncio.wait(self._reporting)
        streams = [stream for _, stream in self._streams.values()]
        await asyncio.gather(*(stream.close() for stream in [*streams, *self._lists]))
        await self._engines.door.close()

    async def __aenter__(self) -> RolloutDriver:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # -- rollouts ---------------------------------------------------------------------------

    async def rollout(
        self,
        rollout_id: int,
        prompts: Sequence[Prompt] | PromptSource,
        *,
        group_size: int,
        sampling: SamplingParams,
        num_groups: int | None = None,
        options: RolloutOptions | None = None,
        weight_version: int | None = None,
        on_sample: OnSample | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[SampleGroup]:
        """The groups of one step.

        Args:
            rollout_id: the step; kept in each sample's metadata.
            prompts: a list, of which every prompt comes back as a group; or a source, of which
                the next ``num_groups`` are made, and which keeps its partial groups here.
            options: how; see ``RolloutOptions``.
            weight_version: the policy's, where the caller knows it; samples are too old by it.
            on_sample: called as each sample ends.
            on_progress: called as the batch fills, for a progress bar.

        Raises:
            ConfigError: no prompt, an empty prompt, or a setting that does not fit.
            RolloutError: too many samples failed, or filters dropped too much; nothing is lost.
        """
        self._watch()
        options = options or self._options
        if weight_version is not None:
            self.set_weight_version(weight_version)
        if isinstance(prompts, Sequence):
            self._check(prompts)
            batch = Batch(len(prompts), group_size, sampling)
            stream = Stream(Fixed(prompts), self._engines, self._hooks, batch, options)
            self._lists.add(stream)
        else:
            if num_groups is None:
                raise ConfigError("num_groups is needed to roll out from a source")
            stream = self._stream(prompts, Batch(num_groups, group_size, sampling), options)
        if options.max_version_lag is not None:
            await self._refresh()
        try:
            groups = await stream.batch(on_sample=on_sample, on_progress=on_progress)
        finally:
            if stream in self._lists:
                await stream.close()
                self._lists.discard(stream)
        if isinstance(prompts, Sequence) and not groups:
            raise RolloutError(f"filters dropped all groups: {dict(stream.stats.rejected)}")
        for group in groups:
            for sample in group.samples:
                sample.metadata["rollout_id"] = rollout_id
        figures = step_metrics(groups, stream.stats, weight_version=self.weight_version)
        self._tell(rollout_id, figures, lengths=length_histogram(list(all_samples(groups))))
        return groups

    async def evaluate(self, rollout_id: int, datasets: Mapping[str, EvalDataset]) -> EvalResult:
        """Evaluate every data set, all tokens from one weight version.

        Raises:
            ConfigError: a data set's settings do not fit.
            RolloutError: the weight version changed meanwhile, and again when it was redone.
        """
        self._watch()
        await self._refresh()
        result = await evaluated(
            rollout_id, datasets, self._engines, self._hooks, self._engines.weight_version
        )
        self._tell(rollout_id, result.metrics)
        return result

    # -- state ------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int | None:
        """The policy's newest version, as far as the driver knows."""
        return self._engines.weight_version

    def set_weight_version(self, version: int) -> None:
        """The policy has moved on; an older one than is known changes nothing."""
        self._engines.weight_version = max(version, self._engines.weight_version or 0)

    def state_of(self, source: PromptSource) -> dict[str, Any]:
        """Source, partial groups and all: JSON that ``restore`` goes on from.

        Raises:
            ConfigError: nothing was rolled out from this source.
        """
        return self.stream_of(source).state_dict()

    def stream_of(self, source: PromptSource) -> Stream:
        """The stream of a source that was rolled out from.

        Raises:
            ConfigError: nothing was.
        """
        if id(source) not in self._streams:
            raise ConfigError("nothing was rolled out from this source by this driver")
        return self._streams[id(source)][1]

    def restore(
        self,
        source: PromptSource,
        state: Mapping[str, Any],
        *,
        num_groups: int,
        group_size: int,
        sampling: SamplingParams,
        options: RolloutOptions | None = None,
    ) -> None:
        """Go on where ``state`` was written, instead of where ``source`` begins.

        Raises:
            ConfigError: the state does not fit the source or the group size.
        """
        batch = Batch(num_groups, group_size, sampling)
        self._stream(source, batch, options or self._options).load_state_dict(state)

    def _stream(self, source: PromptSource, batch: Batch, options: RolloutOptions) -> Stream:
        if id(source) in self._streams:
            stream = self._streams[id(source)][1]
            stream.change(batch, options)
            return stream
        stream = Stream(source, self._engines, self._hooks, batch, options)
        # With the source, so that its id stays its own.
        self._streams[id(source)] = (source, stream)
        return stream

    # -- engines ----------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._adapt_every_s is not None and self._watching is None:
            self._watching = asyncio.create_task(self._follow_load(self._adapt_every_s))

    async def _follow_load(self, every_s: float) -> None:
        limiter = self._engines.limiter
        while True:
            try:
                load = await self._engines.door.load()
            except Exception:  # the next look may be better
                logger.warning("cannot read the engines' load", exc_info=True)
                load = None
            if load is not None:
                limiter.limit = next_limit(limiter.limit, limiter.num_used, load, self._bounds)
            await asyncio.sleep(every_s)

    async def _refresh(self) -> None:
        load = await self._engines.door.load()
        if load is not None and load.weight_version is not None:
            self.set_weight_version(load.weight_version)

    def _saw_version(self, version: str) -> None:
        number = version_number(version)
        if number is not None and number > (self._engines.weight_version or -1):
            self._engines.weight_version = number

    def _check(self, prompts: Sequence[Prompt]) -> None:
        if not prompts:
            raise ConfigError("rollout needs at least one prompt")
        for index, prompt in enumerate(prompts):
            if not prompt.ids:
                raise ConfigError(f"prompt {index} has no tokens")
            if self._most is not None and len(prompt.ids) > self._most:
                raise ConfigError(
                    f"prompt {index} has {len(prompt.ids)} tokens, at most {self._most} fit",
                    setting="max_prompt_tokens",
                    value=self._most,
                )

    def _tell(self, rollout_id: int, figures: Mapping[str, float], **more: Any) -> None:
        """The caller's callback, and whoever looks at the server; the latter is not waited for."""
        told = {"step": rollout_id, "metrics": dict(figures), **more}
        task = asyncio.create_task(self._engines.door.report(told), name="driver-report")
        self._reporting.add(task)
        task.add_done_callback(self._reporting.discard)
        if self._on_metrics is not None:
            self._on_metrics(rollout_id, figures)


class Driver:
    """The driver for a training loop without an event loop: calls return a ``Pending``.

    Takes the arguments of ``RolloutDriver``; use as a context manager or ``close`` it.  Hooks and
    callbacks are called on the driver's thread.
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
        prompts: Sequence[Prompt] | PromptSource,
        *,
        group_size: int,
        sampling: SamplingParams,
        **more: Any,
    ) -> Pending[list[SampleGroup]]:
        """``RolloutDriver.rollout``, started at once."""
        return self._loop.submit(
            self._driver.rollout(
                rollout_id, prompts, group_size=group_size, sampling=sampling, **more
            )
        )

    def evaluate(self, rollout_id: int, datasets: Mapping[str, EvalDataset]) -> Pending[EvalResult]:
        """``RolloutDriver.evaluate``, started at once."""
        return self._loop.submit(self._driver.evaluate(rollout_id, datasets))

    def set_weight_version(self, version: int) -> None:
        """The policy has moved on."""
        self._do(lambda: self._driver.set_weight_version(version))

    def state_of(self, source: PromptSource) -> dict[str, Any]:
        """``RolloutDriver.state_of``."""
        state: dict[str, Any] = self._do(lambda: self._driver.state_of(source))
        return state

    def restore(self, source: PromptSource, state: Mapping[str, Any], **batch: Any) -> None:
        """``RolloutDriver.restore``."""
        self._do(lambda: self._driver.restore(source, state, **batch))

    def close(self) -> None:
        """Abort what is in flight and close the connections."""
        if self._loop.loop.is_closed():
            return
        try:
            self._loop.submit(self._driver.close()).result()
        finally:
            self._loop.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _do(self, call: Callable[[], Any]) -> Any:
        async def on_the_loop() -> Any:
            return call()

        work: Coroutine[Any, Any, Any] = on_the_loop()
        return self._loop.submit(work).result()
