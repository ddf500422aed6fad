"""Samples for TRL's ``AsyncGRPOTrainer``: its ``RolloutWorkerProtocol``.

Always true: a sample is marked with the oldest weights that one of its tokens came from, and no
token comes from older weights than the engines served when its request was made.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engines.protocol import GenerateReply
from rollout.adapters.trl.requests import check_complete, check_policy, sampling_of, spans_of
from rollout.adapters.trl.scores import score
from rollout.core.arguments import check_number, check_positive, wrong
from rollout.core.errors import LifecycleError, RolloutError, WeightMismatch

if TYPE_CHECKING:
    from rollout.runtime.handle import ServerHandle

logger = logging.getLogger(__name__)
_NOT_COLUMNS = {"prompt", "completion", "completion_ids"}
_HEARTBEAT_S = 1.0
_ABORT_S = 10.0
_STOP_S = 60.0


class RolloutWorker:
    """What ``AsyncGRPOTrainer(rollout_worker=...)`` takes; a thread of its main process.

    It samples while the trainer trains, one turn per prompt, and judges the completions of a prompt
    together.

    Args:
        dataset: rows with a ``prompt``, a text or messages; the other columns go to the reward
            functions.  After the last row comes the first.
        reward_funcs: called as TRL calls them; they may be ``async``.
        processing_class: the tokenizer.
        args: the ``AsyncGRPOConfig`` of the trainer.
        end_ids: tokens that end a completion, besides those of the checkpoint.

    Raises:
        ConfigError: an argument is of another kind, or a setting of ``args`` cannot be sampled.
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
        if not callable(reward_funcs) and not isinstance(reward_funcs, Sequence):
            raise wrong("reward_funcs", reward_funcs, "a function or a list of functions")
        for index, function in enumerate([] if callable(reward_funcs) else reward_funcs):
            if not callable(function):
                raise wrong(f"reward_funcs[{index}]", function, "a function")
        if not hasattr(dataset, "__iter__"):
            raise wrong("dataset", dataset, "rows with a prompt")
        if not hasattr(args, "max_inflight_tasks"):
            raise wrong("args", args, "an AsyncGRPOConfig")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._policy = policy
        self._dataset = dataset
        self._rewards = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        self._tokenizer = processing_class
        self._args = args
        self._sampling = sampling_of(args, end_ids)
        # The trainer counts its versions from 0, the server from its launch.
        self._model_version = self._server_version = 0
        self._under_way: set[str] = set()
        self._alive_at = time.monotonic()
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
        self._thread = threading.Thread(target=self._run, name="trl-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Abort what is under way and wait for the end; for a minute, if a reward does not end."""
        self._stopping.set()
        deadline = time.monotonic() + _STOP_S
        while self._thread is not None and self._thread.is_alive():
            for request_id in list(self._under_way):
                self._abort(request_id)
            self._thread.join(_HEARTBEAT_S)
            if time.monotonic() > deadline:
                logger.warning("the rollout worker did not end within %g s", _STOP_S)
                break
        self._thread = None

    def update_model_version(self, model_version: int) -> None:
        """The trainer calls it after each push.

        Args:
            model_version: the trainer's number, from 0.

        Raises:
            ConfigError: it is no such number.
        """
        check_number("model_version", model_version, least=0, whole=True)
        self._model_version, self._server_version = model_version, self._policy.weight_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise if the thread has failed, or was not active for so long.

        Args:
            stale_after_s: seconds.

        Raises:
            RolloutError: it was not active.
            ConfigError: ``stale_after_s`` is not over 0.
        """
        check_positive("stale_after_s", stale_after_s)
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
        args, rows = self._args, enumerate(self._rows())
        num_groups = max(1, args.max_inflight_tasks // args.num_generations)
        groups: set[asyncio.Task[list[Any]]] = set()
        done: set[asyncio.Task[list[Any]]] = set()
        try:
            while not self._stopping.is_set():
                while len(groups) < num_groups:
                    groups.add(asyncio.create_task(self._group(*next(rows))))
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

    def _rows(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self._dataset

    async def _group(self, group_id: int, row: dict[str, Any]) -> list[Any]:
        """The judged completions of one prompt."""
        prompt_ids = self._tokenised(row["prompt"])
        served, lag = self._server_version, self._server_version - self._model_version
        num_samples = self._args.num_generations
        request_id = os.urandom(12).hex()
        self._under_way.add(request_id)
        try:
            replies = await self._policy.generate(
                [prompt_ids] * num_samples,
                self._sampling,
                request_id=request_id,
                timeout_s=self._args.request_timeout,
            )
        finally:
            self._under_way.discard(request_id)
        check_complete(replies)
        versions = [oldest_version(reply, served) - lag for reply in replies]
        return await self._judged(group_id, row, prompt_ids, replies, versions)

    async def _judged(
        self,
        group_id: int,
        row: dict[str, Any],
        prompt_ids: list[int],
        replies: Sequence[GenerateReply],
        versions: Sequence[int],
    ) -> list[Any]:
        prompt, num_samples = row["prompt"], len(replies)
        completions = [self._completion(prompt, reply) for reply in replies]
        columns = {key: [row[key]] * num_samples for key in row.keys() - _NOT_COLUMNS}
        ids = [list(reply.output_ids) for reply in replies]
        prompts = [prompt] * num_samples
        rewards = {
            name_of(function): await _rewarded(
                function, prompts=prompts, completions=completions, completion_ids=ids, **columns
            )
            for function in self._rewards
        }
        scores = score(rewards)
        self._measure(replies)
        return [
            _sample(
                prompt=prompt,
                completion=completion,
                prompt_ids=prompt_ids,
                reply=reply,
                advantage=advantage,
                model_version=version,
                group_id=group_id,
                metrics=metrics,
            )
            for completion, reply, advantage, version, metrics in zip(
                completions, replies, scores.advantages, versions, scores.metrics, strict=True
            )
        ]

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

    def _tokenised(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            ids = self._tokenizer(prompt)["input_ids"]
        else:
            ids = self._tokenizer.apply_chat_template(
                prompt,
                add_generation_prompt=True,
                return_dict=False,
                **(self._args.chat_template_kwargs or {}),
            )
        return list(map(int, ids))

    def _completion(self, prompt: Any, reply: GenerateReply) -> Any:
        text = self._tokenizer.decode(reply.output_ids, skip_special_tokens=True)
        return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]

    def _measure(self, replies: Sequence[GenerateReply]) -> None:
        num_tokens = sum(len(reply.output_ids) for reply in replies)
        num_cut = sum(_is_cut(reply) for reply in replies)
        self.metrics_queue.put(
            {
                "completions/mean_length": (num_tokens, len(replies)),
                "completions/clipped_ratio": (num_cut, len(replies)),
                "rollout/failover_total": float(sum(reply.num_failovers for reply in replies)),
            }
        )

    def _abort(self, request_id: str) -> None:
        try:
            self._policy.abort(request_id).result(_ABORT_S)
        except (RolloutError, TimeoutError) as error:
            logger.warning("request %s was not aborted: %s", request_id, error)


def oldest_version(reply: GenerateReply, served: int) -> int:
    """The oldest weights that a token of this reply came from.

    Raises:
        WeightMismatch: they are older than those that the engines served at its request.
    """
    versions = [span.version for span in spans_of(reply)]
    oldest = min(int(version) if version.isdecimal() else -1 for version in versions)
    if oldest < served:
        raise WeightMismatch(
            f"a token was sampled with weight version {', '.join(versions)}, but the engines had "
            f"version {served} before its request: an engine has other weights than the trainer "
            "pushed"
        )
    return oldest


def name_of(function: Callable[..., Any]) -> str:
    """A reward function's name in metrics."""
    return getattr(function, "__name__", type(function).__name__)


async def _rewarded(function: Callable[..., Any], **arguments: Any) -> list[float | None]:
    if inspect.iscoroutinefunction(function):
        rewards = await function(**arguments)
    else:
        rewards = await asyncio.to_thread(function, **arguments)
    return list(rewards)


def _is_cut(reply: GenerateReply) -> bool:
    return reply.finish_reason is not None and reply.finish_reason.kind == "length"


def _sample(*, prompt_ids: list[int], reply: GenerateReply, **fields: Any) -> Any:
    """TRL's ``RolloutSample``; log-probs and mask of the prompt are 0."""
    import numpy as np
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    num_prompt, logprobs = len(prompt_ids), reply.output_logprobs or ()
    return RolloutSample(
        input_ids=np.asarray([*prompt_ids, *reply.output_ids], dtype=np.int64),
        completion_mask=np.asarray([0] * num_prompt + [1] * len(logprobs), dtype=np.int64),
        old_log_probs=np.asarray([0.0] * num_prompt + list(logprobs), dtype=np.float32),
        **fields,
    )
