"""Samples for TRL's ``GRPOTrainer``.

Always true: every token that the trainer gets was sampled with the weights that it has now, or the
call raises; every rank takes part in every push.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic import SkipValidation

from engines.protocol.logprob_kind import LogprobKind
from rollout.adapters.trl.requests import check_complete, check_policy, check_versions, sampling_of
from rollout.adapters.trl.trained_weights import trained_weights
from rollout.core.arguments import RankTimeout, Seconds, checked, wrong_type
from rollout.core.errors import RolloutError
from rollout.runtime.handle import ServerHandle

if TYPE_CHECKING:
    from rollout.runtime.handle.pusher import Pusher


class RolloutFunction:
    """What ``GRPOTrainer(rollout_func=...)`` takes; also a context manager.

    Each call pushes the trainer's weights if they have changed, and samples one completion for each
    prompt that TRL passes, which repeats a prompt ``num_generations`` times.  Engines that share
    their GPUs with the trainer (``needs_offload``) release their memory after it.

    With the first call TRL's importance sampling is on, as with vLLM: unless
    ``vllm_importance_sampling_correction=False``, it compares the engines' log-probs with the
    model's, logs the difference and corrects for it.

    Args:
        policy: of this process; every rank of the trainer has one, see ``rollout.connect``.
        group: the ranks that train, a process group of torch.distributed, or None for all.
        rank_timeout_s: a push fails on all ranks if one is silent for so many seconds.
        request_timeout_s: seconds for each completion.

    Raises:
        TypeError: ``policy`` is no handle of a server, or a timeout is no number.
        ValueError: a timeout is not over 0.
    """

    @checked
    def __init__(
        self,
        policy: SkipValidation[ServerHandle],
        *,
        group: Any = None,
        rank_timeout_s: RankTimeout = 30.0,
        request_timeout_s: Seconds = 600.0,
    ) -> None:
        check_policy(policy)
        self._policy = policy
        self._group = group
        self._rank_timeout_s = rank_timeout_s
        self._request_timeout_s = request_timeout_s
        self._pusher: Pusher | None = None
        # The trainer's state and step whose weights the engines serve, and their version.
        self._served: tuple[Any, int] | None = None
        self._version = 0
        self._is_closed = False

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Completions of this rank's prompts; every rank calls it.

        Args:
            prompts: texts or lists of messages.
            trainer: the ``GRPOTrainer``.

        Raises:
            ValueError: the trainer uses what cannot be sampled here.
            WeightMismatch: a token was sampled with other weights than the trainer's.
            GenerationFailed: a completion is missing or was aborted; or no engine has the log-probs
                that TRL computes.
            RankFailure: a rank failed in the push, or is silent there or after its samples.
        """
        self._check(trainer)
        if why := _why_not(trainer):
            raise ValueError(why)
        prompt_ids = _tokenised(prompts, trainer)
        self.sync_weights(trainer)
        sampling = sampling_of(trainer.args, trainer.eos_token_ids)
        replies = self._policy.generate(
            prompt_ids,
            sampling,
            timeout_s=self._request_timeout_s,
            logprob_kind=LogprobKind.FULL,
        ).result()
        self._offload()  # the other ranks wait for it, so an error of the replies comes after
        check_complete(replies)
        check_versions(replies, self._version)
        _correct_importance(self, trainer)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(reply.output_ids) for reply in replies],
            "logprobs": [list(reply.output_logprobs or ()) for reply in replies],
        }

    def sync_weights(self, trainer: Any) -> None:
        """Push the trainer's weights, unless the engines serve them; every rank calls it.

        Args:
            trainer: the ``GRPOTrainer``.

        Raises:
            ConfigError: it is none, or its kind of model cannot be pushed.
            WeightMismatch: the weights do not fit the engines' model.
            RankFailure: a rank failed, or is silent.
            RolloutError: this is closed.
        """
        self._check(trainer)
        now = trainer.state, trainer.state.global_step
        # A new state is another trainer, or another call of ``train``, which counts from 0.
        if self._served is not None and self._served[0] is now[0] and self._served[1] == now[1]:
            return
        if self._pusher is None:
            self._pusher = self._policy.pusher(self._group, rank_timeout_s=self._rank_timeout_s)
        self._served = None
        # A rank whose rewards took longer is not silent.
        trainer.accelerator.wait_for_everyone()
        with trained_weights(trainer.accelerator.unwrap_model(trainer.model)) as weights:
            self._version = self._pusher.push(weights).weight_version
        self._served = now

    def close(self) -> None:
        """Free this rank's shared memory; for good."""
        self._is_closed = True
        if self._pusher is not None:
            self._pusher.close()
            self._pusher = None

    def _check(self, trainer: Any) -> None:
        if self._is_closed:
            raise RolloutError("this RolloutFunction is closed; make another one")
        if not hasattr(trainer, "state") or not hasattr(trainer, "accelerator"):
            raise wrong_type("trainer", trainer, "a GRPOTrainer")

    def __enter__(self) -> RolloutFunction:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _offload(self) -> None:
        """Let the trainer have the memory of engines that share it; every rank calls it."""
        groups = self._policy.status().result().groups
        if self._pusher is None or not any(group.needs_offload for group in groups):
            return
        self._served = None
        # Another rank may still sample for as long as one completion may take.
        self._pusher.offload(rank_timeout_s=self._rank_timeout_s + self._request_timeout_s)


def _why_not(trainer: Any) -> str:
    """Why this trainer cannot sample here."""
    if trainer.args.use_vllm:
        return "GRPOConfig(use_vllm=True) starts vLLM besides the engines; leave it out"
    if trainer.tools or trainer.environment_factories:
        return (
            "GRPOTrainer calls tools and environments with a generation of its own; "
            "with a RolloutFunction, leave out tools and environment_factory"
        )
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        return "FSDP1 keeps flat parameters, which cannot be pushed; set fsdp_version: 2"
    return ""


def _tokenised(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """The prompts as TRL itself tokenises them.

    Raises:
        ValueError: one has an image.
    """
    prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
    if images is not None:
        raise ValueError("prompts with images are not supported by RolloutFunction")
    return [list(map(int, ids)) for ids in prompt_ids]


def _correct_importance(function: RolloutFunction, trainer: Any) -> None:
    """Let TRL use the engines' log-probs, which it ignores unless ``use_vllm`` is set.

    Set at construction it would start vLLM; later it makes TRL compare log-probs and call
    ``sync_weights`` before a rollout.
    """
    if trainer.vllm_importance_sampling_correction and not trainer.use_vllm:
        trainer.use_vllm = True
        trainer.vllm_generation = SimpleNamespace(
            sync_weights=partial(function.sync_weights, trainer)
        )
        trainer._last_loaded_step = trainer.state.global_step
