"""The judged completions of one prompt, as samples of TRL's ``AsyncGRPOTrainer``.

Always true: a sample is marked with the oldest weights that one of its tokens came from, and no
token comes from older weights than the engines served when its request was made.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engines.protocol import GenerateReply
from engines.protocol.logprob_kind import LogprobKind
from rollout.adapters.trl.requests import check_complete, sampling_of, spans_of
from rollout.adapters.trl.scores import score
from rollout.core.errors import WeightMismatch

if TYPE_CHECKING:
    from rollout.runtime.handle import ServerHandle

_NOT_COLUMNS = {"prompt", "completion", "completion_ids"}


class GroupSampler:
    """Samples the completions of a prompt and judges them together.

    Args:
        metrics: gets the figures of each group.

    Attributes:
        under_way: ids of the requests that have not ended.
    """

    def __init__(
        self,
        policy: ServerHandle,
        rewards: Sequence[Callable[..., Any]],
        tokenizer: Any,
        args: Any,
        end_ids: Sequence[int],
        metrics: queue.Queue[dict[str, Any]],
    ) -> None:
        self.under_way: set[str] = set()
        self._policy = policy
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._args = args
        self._sampling = sampling_of(args, end_ids)
        self._metrics = metrics
        # The trainer's version, counted from 0, and the server's, from its launch: one value,
        # because another thread reads it.
        self._versions = (0, 0)

    def set_model_version(self, model_version: int) -> None:
        """The trainer has pushed, under this number of its own."""
        self._versions = (model_version, self._policy.weight_version)

    async def group(self, group_id: int, row: dict[str, Any]) -> list[Any]:
        """The judged completions of one prompt."""
        prompt_ids = self._tokenised(row["prompt"])
        trained, served = self._versions
        lag = served - trained
        num_samples = self._args.num_generations
        request_id = os.urandom(12).hex()
        self.under_way.add(request_id)
        try:
            replies = await self._policy.generate(
                [prompt_ids] * num_samples,
                self._sampling,
                request_id=request_id,
                timeout_s=self._args.request_timeout,
                logprob_kind=LogprobKind.FULL,
            )
        finally:
            self.under_way.discard(request_id)
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
        self._metrics.put(
            {
                "completions/mean_length": (num_tokens, len(replies)),
                "completions/clipped_ratio": (num_cut, len(replies)),
                "rollout/failover_total": float(sum(reply.num_failovers for reply in replies)),
            }
        )


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
