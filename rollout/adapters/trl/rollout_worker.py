"""Samples for TRL's ``AsyncGRPOTrainer``: its ``RolloutWorkerProtocol``.

Always true: it samples on a thread of its own, and an error there is raised by ``check_health``.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engines.process.background import Then, in_own_thread, keep_thread, start_task
from rollout.adapters.trl.judged_groups import GroupSampler
from rollout.adapters.trl.requests import check_policy
from rollout.core.arguments import Count, Seconds, checked, wrong_type
from rollout.core.errors import ConfigError, LifecycleError, RolloutError

if TYPE_CHECKING:
    from rollout.runtime.handle import ServerHandle

logger = logging.getLogger(__name__)
_HEARTBEAT_S = 1.0
_ABORT_S = 10.0
_STOP_S = 60.0


class RolloutWorker:
    """What ``AsyncGRPOTrainer(rollout_worker=...)`` takes; a thread of its main process.

    It samples while the trainer trains, one turn per prompt, and judges the completions of a prompt
    together.

    Args:
        dataset: rows with a ``prompt``, a text or messages; the other columns go to the reward
            functions.  After the last row comes the first, so a generator, which ends for good,
            is an error at its end.
        reward_funcs: called as TRL calls them; they may be ``async``.
        processing_class: the tokenizer.
        args: the ``AsyncGRPOConfig`` of the trainer.
        end_ids: tokens that end a completion, besides those of the checkpoint.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a setting of ``args`` cannot be sampled.
    """

    def __init__(
        self,
        policy: ServerHandle,
        dataset: Any,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        processing_class: Any,
        args: Any,
        *,
        end_ids: Sequence[int] = (),
    ) -> None:
        check_policy(policy)
        rewards = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        for index, function in enumerate(rewards):
            if not callable(function):
                raise wrong_type(f"reward_funcs[{index}]", function, "a function")
        if not hasattr(dataset, "__iter__"):
            raise wrong_type("dataset", dataset, "rows with a prompt")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._sampler = GroupSampler(
            policy, rewards, processing_class, args, end_ids, self.metrics_queue
        )
        self._policy = policy
        self._dataset = dataset
        self._args = args
        self._alive_at = time.monotonic()
        self._no_rows = ConfigError("dataset: it has ended", setting="dataset")
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # -- the protocol -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to sample.

        Raises:
            LifecycleError: it has begun.
        """
        if self._thread is not None:
            raise LifecycleError("the rollout worker has been started", command="start")
        self._alive_at = time.monotonic()
        self._thread = keep_thread(self._run, "trl-rollouts", Then.IS_OVER)

    def stop(self) -> None:
        """Abort what is under way and wait for the end; for a minute, if a reward does not end."""
        self._stopping.set()
        deadline = time.monotonic() + _STOP_S
        while self._thread is not None and self._thread.is_alive():
            for request_id in list(self._sampler.under_way):
                self._abort(request_id)
            self._thread.join(_HEARTBEAT_S)
            if time.monotonic() > deadline:
                logger.warning("the rollout worker did not end within %g s", _STOP_S)
                break
        self._thread = None

    @checked
    def update_model_version(self, model_version: Count) -> None:
        """The trainer calls it after each push.

        Args:
            model_version: the trainer's number, from 0.

        Raises:
            TypeError, ValueError: it is no such number.
        """
        self._sampler.set_model_version(model_version)

    @checked
    def check_health(self, stale_after_s: Seconds) -> None:
        """Raise if the thread has failed, or was not active for so long.

        Args:
            stale_after_s: seconds.

        Raises:
            RolloutError: it was not active.
            ValueError: ``stale_after_s`` is not over 0.
        """
        if self._error is not None:
            raise self._error
        silent_s = time.monotonic() - self._alive_at
        if silent_s > stale_after_s:
            raise RolloutError(
                f"the rollout worker was not active for {silent_s:.0f} s, of at most "
                f"{stale_after_s:g} s: a reward function may block its event loop"
            )

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._produce())
        except Exception as error:
            if not self._stopping.is_set():  # then requests are aborted on purpose
                logger.exception("the rollout worker has failed")
                self._error = error

    async def _produce(self) -> None:
        args, rows, is_free = self._args, enumerate(self._rows()), asyncio.Lock()
        num_groups = max(1, args.max_inflight_tasks // args.num_generations)
        groups: set[asyncio.Task[list[Any]]] = set()
        done: set[asyncio.Task[list[Any]]] = set()
        try:
            while not self._stopping.is_set():
                while len(groups) < num_groups:
                    groups.add(start_task(self._group(rows, is_free), "trl-group"))
                self._alive_at = time.monotonic()
                done, groups = await asyncio.wait(
                    groups, timeout=_HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    await self._deliver(task.result())
        finally:
            for task in groups:
                task.cancel()
            # Their errors are taken: the first one is raised already.
            await asyncio.gather(*done, *groups, return_exceptions=True)

    async def _group(
        self, rows: Iterator[tuple[int, dict[str, Any]]], is_free: asyncio.Lock
    ) -> list[Any]:
        """The judged completions of the next row, which may take its time."""
        async with is_free:
            row = in_own_thread(partial(next, rows, None), "trl-rows")
            taken = await asyncio.wrap_future(row)
            if taken is None:  # an earlier group has met their end
                raise self._no_rows
            number, values = taken
        return await self._sampler.group(number, values)

    def _rows(self) -> Iterator[dict[str, Any]]:
        """The rows, over and over.

        Raises:
            ConfigError: there is none in the data set, or none any more.
        """
        num_passes = 0
        while True:
            has_row = False
            for row in self._dataset:
                has_row = True
                yield row
            if not has_row:
                why = "it gave no row when it was read again, as a generator does"
                self._no_rows = ConfigError(
                    f"dataset: {why if num_passes else 'it has no rows'}; give a list or a "
                    "datasets.Dataset with rows",
                    setting="dataset",
                )
                raise self._no_rows
            num_passes += 1

    async def _deliver(self, samples: list[Any]) -> None:
        for sample in samples:
            sample.enqueued_at = time.time()
            while not self._stopping.is_set():
                try:
                    self.rollout_buffer.put_nowait(sample)
                    break
                except queue.Full:  # the trainer takes its time
                    self._alive_at = time.monotonic()
                    await asyncio.sleep(0.05)

    def _abort(self, request_id: str) -> None:
        try:
            self._policy.abort(request_id).result(_ABORT_S)
        except (RolloutError, TimeoutError) as error:
            logger.warning("request %s was not aborted: %s", request_id, error)
