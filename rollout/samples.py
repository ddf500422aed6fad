"""What a rollout makes: samples, and the groups of siblings they come in.

What always holds of a sample that has just been made or checked:
- ids, log-probs and loss mask of its output have one length;
- its version spans ascend, do not overlap, and cover every token that a policy drew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engines.protocol import FinishReason, VersionSpan


class SampleStatus(StrEnum):
    """How far a sample has come.  ``pending`` and ``aborted`` ones can be gone on with."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)
class Sample:
    """One prompt and one completion.

    Attributes:
        prompt_ids: token ids of the prompt, shape ``[prompt_length]``.
        output_ids: token ids of the completion, shape ``[output_length]``.
        output_logprobs: natural-log probability of each output id under the policy that drew
            it, shape ``[output_length]``; 0.0 where the mask is 0.
        weight_versions: spans that say which weight version drew which output tokens; none where
            the engine does not tell.
        finish_reason: the engine's own word on why generation ended; None for a failed sample.
        reward: None until rewarded.
        error: what went wrong, for a failed sample.
        loss_mask: 1 for an output token that a policy drew, 0 for one that came from elsewhere
            (a tool, an environment), shape ``[output_length]``; all ones if left out.
        traceback: of the exception behind ``error``, where a hook raised one.

    Raises:
        ValueError: the lengths disagree, or spans do not fit the output.
    """

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    text: str = ""
    weight_versions: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason | None = None
    status: SampleStatus = SampleStatus.COMPLETED
    reward: float | None = None
    error: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    loss_mask: list[int] | None = None
    traceback: str = ""

    def __post_init__(self) -> None:
        if self.loss_mask is None:
            self.loss_mask = [1] * len(self.output_ids)
        self.check()

    def check(self) -> None:
        """Hold the sample against what always holds; for whoever has changed it.

        Raises:
            ValueError: the lengths disagree, or spans do not fit the output.
        """
        length = len(self.output_ids)
        if length != len(self.output_logprobs):
            raise ValueError(
                f"{length} output ids but {len(self.output_logprobs)} log-probs; "
                "a sample is never padded or cut to make them agree"
            )
        if length != len(self.mask):
            raise ValueError(f"{length} output ids but a loss mask of {len(self.mask)}")
        end = 0
        for span in self.weight_versions:
            if not end <= span.start < span.end <= length:
                raise ValueError(
                    f"version span {span.start}..{span.end} of {span.version!r} does not fit "
                    f"after token {end} of {length}"
                )
            if any(self.mask[end : span.start]):
                raise ValueError(f"no weight version for output tokens {end}..{span.start}")
            end = span.end
        if self.weight_versions and any(self.mask[end:]):
            raise ValueError(f"no weight version for output tokens {end}..{length}")

    @property
    def mask(self) -> list[int]:
        """The loss mask."""
        assert self.loss_mask is not None  # made with the sample
        return self.loss_mask

    @property
    def is_unfinished(self) -> bool:
        """Whether generation has still to begin or to go on."""
        return self.status in (SampleStatus.PENDING, SampleStatus.ABORTED)

    @property
    def versions(self) -> list[int]:
        """Numbers of the weight versions that drew it, oldest span first; what is no number
        (``default``, say) is left out.
        """
        return [
            number
            for span in self.weight_versions
            if (number := version_number(span.version)) is not None
        ]

    def fail(self, error: str, traceback: str = "") -> None:
        """It has failed; tokens are kept, a reward is not."""
        self.status = SampleStatus.FAILED
        self.error = error
        self.traceback = traceback
        self.reward = None


def version_number(version: str) -> int | None:
    """A weight version as a number; None where it is none of ours."""
    return int(version) if version.isascii() and version.isdigit() else None


@dataclass(slots=True)
class SampleGroup:
    """Siblings: all samples of one prompt in one rollout.

    Attributes:
        prompt_index: place of the prompt: in the list it was given in, or since the source began.
    """

    prompt_index: int
    samples: list[Sample]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the samples that have one."""
        return [sample.reward for sample in self.samples if sample.reward is not None]

    @property
    def has_zero_std(self) -> bool:
        """Whether rewards are all equal, so that a group-relative advantage is zero."""
        rewards = self.rewards
        return bool(rewards) and all(math.isclose(one, rewards[0]) for one in rewards)

    def __len__(self) -> int:
        return len(self.samples)


def all_samples(groups: Sequence[SampleGroup]) -> Iterator[Sample]:
    """The samples of several groups, in order."""
    return (sample for group in groups for sample in group.samples)
