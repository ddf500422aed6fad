"""GRPO: a policy gradient whose baseline is the mean reward of the group.

DeepSeekMath (arXiv 2402.03300, section 4.1).  A group is G samples of one prompt with rewards
``r_1 .. r_G``; every token t of sample i gets the advantage ``A_i = (r_i - mean(r)) / std(r)`` and
the loss is PPO's clipped surrogate (arXiv 1707.06347, equation 7) with

    ratio_it = exp(log pi(o_it | q, o_i<t) - log pi_behaviour(o_it | q, o_i<t))
    loss     = -mean_it min(ratio_it * A_i, clip(ratio_it, 1 - epsilon, 1 + epsilon) * A_i)

The behaviour log-probs are the engine's.  The mean is over the tokens of all samples (as DAPO,
arXiv 2503.14476, equation 8), not first over each sample; there is no KL term to a reference.

Always true: padding changes nothing; a group whose rewards are all equal adds nothing to the
gradient; between ``offload`` and ``push`` the trainer holds parameters and optimizer moments
only.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM


class GradedSample(Protocol):
    """The fields of a sample that the trainer reads; ``rollout.Sample`` has them.

    A sample without a reward or without output (failed, aborted) is left out of its group.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    output_logprobs: list[float]
    reward: float | None


@dataclass(frozen=True, slots=True)
class GrpoConfig:
    """Hyperparameters of the trainer.

    Attributes:
        learning_rate: of AdamW, constant.
        clip_range: epsilon above; a token whose ratio has left ``1 +- epsilon`` in the direction
            of its advantage has no gradient.
        num_minibatches: optimizer steps per rollout, each on its share of the samples.
        max_grad_norm: gradients with a larger L2 norm are scaled down to it.
    """

    learning_rate: float = 3e-4
    clip_range: float = 0.2
    num_minibatches: int = 2
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """N samples of at most T tokens, prompt included, right-padded.

    Attributes:
        token_ids: prompt and output, int64 ``[N, T]``.
        mask: 1.0 where ``token_ids[:, 1:]`` is an output token, float32 ``[N, T - 1]``.
        behaviour_logprobs: from the engine, natural log, 0 outside the mask, float32
            ``[N, T - 1]``.
        advantages: float32 ``[N]``.
    """

    token_ids: torch.Tensor
    mask: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor

    def __len__(self) -> int:
        return len(self.advantages)

    def select(self, rows: torch.Tensor) -> Batch:
        return Batch(
            self.token_ids[rows],
            self.mask[rows],
            self.behaviour_logprobs[rows],
            self.advantages[rows],
        )


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """``(r - mean) / std`` within one group; all zero where the rewards are all equal."""
    mean = sum(rewards) / len(rewards)
    std = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def make_batch(groups: Sequence[Iterable[GradedSample]], pad_to: int = 0) -> Batch:
    """Pad all samples to the longest of them, or to ``pad_to`` tokens if that is longer.

    Raises:
        ValueError: no sample has both a reward and output.
    """
    samples: list[GradedSample] = []
    advantages: list[float] = []
    for group in groups:
        graded = [s for s in group if s.reward is not None and s.output_ids]
        if graded:
            samples += graded
            advantages += group_advantages([s.reward for s in graded if s.reward is not None])
    if not samples:
        raise ValueError("nothing to train on: no sample has both a reward and output")
    width = max(pad_to, *(len(s.prompt_ids) + len(s.output_ids) for s in samples))
    token_ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask = torch.zeros(len(samples), width - 1)
    behaviour_logprobs = torch.zeros(len(samples), width - 1)
    for row, sample in enumerate(samples):
        start, stop = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.output_ids)
        token_ids[row, :stop] = torch.tensor(sample.prompt_ids + sample.output_ids)
        mask[row, start - 1 : stop - 1] = 1.0
        behaviour_logprobs[row, start - 1 : stop - 1] = torch.tensor(sample.output_logprobs)
    return Batch(token_ids, mask, behaviour_logprobs, torch.tensor(advantages))


def token_logprobs(model: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Natural log-probs of ``token_ids[:, 1:]`` at temperature 1, float32 ``[N, T - 1]``.

    Padding is on the right, where causal attention does not see it, so no mask is needed.
    """
    logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits.float()
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    return logprobs


class GrpoTrainer:
    """Trains the model in a Hugging Face directory, in float32 on the CPU."""

    def __init__(self, model_path: Path | str, config: GrpoConfig | None = None, seed: int = 0):
        self.config = config or GrpoConfig()
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.config.learning_rate, weight_decay=0.0
        )
        self._shuffle = torch.Generator().manual_seed(seed)
        self._is_offloaded = False

    def step(self, groups: Sequence[Iterable[GradedSample]]) -> dict[str, float]:
        """Learn from one rollout: ``groups[i]`` has the samples of prompt i, as a ``SampleGroup``.

        Returns means over the rollout: ``reward``; ``loss``; ``grad_norm``, L2 before
        clipping; ``kl`` from the behaviour policy to the one being trained, nats per token; and
        ``logprob_gap``, the mean absolute difference between engine and trainer before the first
        optimizer step, which is rounding (below 1e-5) when both hold the same weights.
        """
        if self._is_offloaded:
            raise RuntimeError("the trainer is offloaded; onload() it before step()")
        batch = make_batch(groups)
        rows = torch.randperm(len(batch), generator=self._shuffle)
        updates = [
            self._update(batch.select(part))
            for part in rows.tensor_split(min(self.config.num_minibatches, len(batch)))
        ]
        metrics = {key: sum(u[key] for u in updates) / len(updates) for key in updates[0]}
        rewards = [s.reward for group in groups for s in group if s.reward is not None]
        metrics["reward"] = sum(rewards) / len(rewards)
        metrics["logprob_gap"] = updates[0]["logprob_gap"]
        return metrics

    def loss(self, batch: Batch, logprobs: torch.Tensor) -> torch.Tensor:
        """The clipped surrogate above, a scalar; ``logprobs`` as ``token_logprobs`` gives them."""
        ratio = ((logprobs - batch.behaviour_logprobs) * batch.mask).exp()
        clipped = ratio.clamp(1 - self.config.clip_range, 1 + self.config.clip_range)
        advantages = batch.advantages[:, None]
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        return -(surrogate * batch.mask).sum() / batch.mask.sum()

    def _update(self, batch: Batch) -> dict[str, float]:
        logprobs = token_logprobs(self.model, batch.token_ids)
        loss = self.loss(batch, logprobs)
        self.optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.max_grad_norm
        )
        self.optimizer.step()

        log_ratio = (logprobs.detach() - batch.behaviour_logprobs)[batch.mask.bool()]
        return {
            "loss": loss.item(),
            "grad_norm": grad_norm.item(),
            # E[ratio - 1 - log ratio] is KL(behaviour | policy), and never below 0.
            "kl": (log_ratio.exp() - 1 - log_ratio).mean().item(),
            "logprob_gap": log_ratio.abs().mean().item(),
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The parameters under their Hugging Face names; views that the next step changes."""
        return {name: tensor.detach() for name, tensor in self.model.named_parameters()}

    def offload(self) -> None:
        """Return the memory of gradients and activations to the operating system.

        Parameters stay, for the push, and so do the moments of the optimizer.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self._is_offloaded = True
        gc.collect()
        if sys.platform == "linux":
            # Freed blocks stay in the heap of the C library until it trims; musl has no such
            # call.
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)

    def onload(self) -> None:
        """Allow ``step`` again, which allocates the gradients."""
        self._is_offloaded = False
