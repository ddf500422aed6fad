"""The output of a rollout: samples, and groups of samples of one prompt.

Always true of a sample after its creation and after ``check``:
- its output ids, log-probs and loss mask have the same length;
- its version spans ascend, do not overlap, and cover every token that a policy generated;
- its engine spans ascend and do not overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engines.protocol import FinishReason, VersionSpan
from engines.protocol.logprob_kind import LogprobKind


class SampleStatus(StrEnum):
    """The progress of a sample.  ``pending`` and ``aborted`` samples can be continued."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class SampleFailure(StrEnum):
    """What a failed sample failed of, as far as a trainer would treat it differently.

    ``too_long``: an engine's context has no room for its prompt, or for what its environment
    added.  ``timeout``: a hook did not return in its time.  ``generate_error``: the ``generate``
    hook, so a tool or an environment, raised.  ``reward_error``: so did the reward, or its value is
    none.  ``filter_error``: so did a filter or ``post_process``.  ``engine``: no engine answered,
    or no answer could be used.
    """

    TOO_LONG = "too_long"
    TIMEOUT = "timeout"
    GENERATE_ERROR = "generate_error"
    REWARD_ERROR = "reward_error"
    FILTER_ERROR = "filter_error"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class EngineSpan:
    """Output tokens ``start`` up to, not including, ``end`` came from engine ``engine_id``."""

    engine_id: str
    start: int
    end: int


@dataclass(slots=True)
class Sample:
    """One prompt and one completion.

    Attributes:
        prompt_ids: token ids of the prompt, shape ``[prompt_length]``.
        output_ids: token ids of the completion, shape ``[output_length]``.
        output_logprobs: natural-log probability of each output id under the policy that
            generated it, shape ``[output_length]``; 0.0 where the mask is 0.
        weight_versions: which weight version generated which output tokens, or empty if the engine
            does not report versions.
        finish_reason: why generation ended, as the engine reports it, or None for a failed sample.
        reward: None before the sample is rewarded.
        error: why a failed sample failed.
        failure: the kind of it, or None for a sample that has not failed.
        loss_mask: 1 for an output token that a policy generated, 0 for a token of a tool or an
            environment, shape ``[output_length]``; all ones if left out.
        traceback: traceback of the exception behind ``error``, if a hook raised one.
        engines: which engine generated which output tokens; tokens whose engine is not known (after
            a failover inside one reply, or without a router) are in no span.
        routed_experts: for each token that was computed, prompt included, the experts that computed
            it: int32, C order, shape ``[tokens, layers, experts per token]``.  The last token was
            not computed, and neither was what an environment appended to it.  None unless
            requested, and where an engine did not report those of its tokens.
        sampling_mask: for each output token the ids that top-k, top-p and min-p left to draw it
            from, or None for a token where they cut nothing, and where the mask is 0.  None unless
            requested, and where an engine did not report it.
        logprob_kind: the distribution of ``output_logprobs``: ``full`` for log-softmax of
            logits / temperature, ``raw`` at temperature 1 where the request has another one,
            ``cut`` behind top-p, top-k or min-p, ``penalised`` of logits that penalties, biases, a
            grammar or a least length changed.  None where it is not known.

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
    engines: tuple[EngineSpan, ...] = ()
    routed_experts: bytes | None = None
    logprob_kind: LogprobKind | None = None
    failure: SampleFailure | None = None
    sampling_mask: list[list[int] | None] | None = None

    def __post_init__(self) -> None:
        if self.loss_mask is None:
            self.loss_mask = [1] * len(self.output_ids)
        self.check()

    def check(self) -> None:
        """Check the invariants after code has changed the sample.

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
        if self.sampling_mask is not None and length != len(self.sampling_mask):
            raise ValueError(f"{length} output ids but {len(self.sampling_mask)} sampling masks")
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
        end = 0
        for part in self.engines:
            if not end <= part.start < part.end <= length:
                raise ValueError(
                    f"engine span {part.start}..{part.end} of {part.engine_id!r} does not fit "
                    f"after token {end} of {length}"
                )
            end = part.end

    @property
    def mask(self) -> list[int]:
        """The loss mask."""
        assert self.loss_mask is not None  # set by __post_init__
        return self.loss_mask

    @property
    def is_unfinished(self) -> bool:
        """Whether generation can be started or continued."""
        return self.status in (SampleStatus.PENDING, SampleStatus.ABORTED)

    @property
    def versions(self) -> list[int]:
        """Numbers of its weight versions, oldest span first, without versions that are not numbers
        (for example ``default``).
        """
        return [
            number
            for span in self.weight_versions
            if (number := version_number(span.version)) is not None
        ]

    def fail(self, error: str, traceback: str = "", *, failure: SampleFailure) -> None:
        """Mark the sample as failed; its tokens are kept, its reward is removed.

        Args:
            error: why, for its ``error``.
            traceback: traceback of the exception behind it.
            failure: kind of the failure; a sample that has failed before keeps its kind.
        """
        self.failure = self.failure or failure
        self.status = SampleStatus.FAILED
        self.error = error
        self.traceback = traceback
        self.reward = None


def version_number(version: str) -> int | None:
    """A weight version as a number, or None if it is not a number.

    Args:
        version: the version that an engine reports.
    """
    return int(version) if version.isascii() and version.isdigit() else None


@dataclass(slots=True)
class SampleGroup:
    """All samples of one prompt in one rollout.

    Attributes:
        prompt_index: index of the prompt in the given list, or since the start of the source.
        samples: a list.
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
        """Whether all rewards are equal, so that a group-relative advantage is zero."""
        rewards = self.rewards
        return bool(rewards) and all(math.isclose(reward, rewards[0]) for reward in rewards)

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)


def all_samples(groups: Sequence[SampleGroup]) -> Iterator[Sample]:
    """The samples of several groups, in order.

    Args:
        groups: a list.
    """
    return (sample for group in groups for sample in group.samples)
