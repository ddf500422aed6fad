"""Settings of a rollout, and how many groups and how old weights they allow.

Always true: the values of settings are checked when they are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from engines.protocol import SamplingParams
from rollout.core.arguments import Count, Positive, Seconds, Share, options, wrong
from rollout.core.samples import Sample
from rollout.driver.client.sampling_check import check_sampling

Mode = Literal["sync", "one_ahead", "async"]
WhenStale = Literal["redo", "drop"]
# All of ``SampleFailure`` but ``filter_error``: what a filter would have kept is not known.
ExpectedFailure = Literal["too_long", "timeout", "generate_error", "reward_error", "engine"]
WhenFailed = Literal["keep", "mask", "drop"]


@options
class RolloutOptions:
    """Settings of a rollout from a source.

    Attributes:
        mode: when generation may run.  ``sync``: only during a call for a batch; what the batch
            does not need is aborted.  ``one_ahead``: up to one batch, also between calls.
            ``async``: always, up to the number of batches that staleness allows.
        over_sampling: groups to run per wanted group; ready groups beyond the batch go to the
            next batch.
        partial: samples that are unfinished when the batch is full keep their tokens and continue
            in the next batch; if False, they restart.
        max_version_lag: weight versions that the oldest token of a sample may be behind, or after
            a trainer went back the newest one ahead, or None for no limit.
        when_stale: whether stale groups are generated again (``redo``) or dropped (``drop``).
        max_redone: how often a stale group is generated again before it is dropped.
        max_rejected: groups that filters may drop for one batch; None: 10 per wanted group.
        max_failed_share: allowed share of failed samples in a batch, without the kinds that
            ``when_failed`` names; above it the call raises, and the finished samples stay for the
            next call.
        when_failed: what becomes of failed samples by their kind, ``Sample.failure``: ``keep`` as
            they are, without a reward; ``mask``, which sets their loss mask to 0; or ``drop`` from
            their group, and the group with its last one.  Kinds that are not named are kept within
            ``max_failed_share``.
        logprob_kind: that each token's log-prob must have: ``full``, which a trainer computes.
            None takes any, and each sample says which: for a trainer that computes those of the old
            policy itself, and so may sample with cuts, penalties and grammars on all engines.
        abort_timeout_s: seconds in which aborted requests must end.

    Raises:
        TypeError, ValueError: a value is not one of these; it is named.
    """

    mode: Mode = "sync"
    over_sampling: Annotated[float, Field(ge=1)] = 1.0
    partial: bool = True
    max_version_lag: Count | None = None
    when_stale: WhenStale = "redo"
    max_redone: Count = 3
    max_rejected: Count | None = None
    max_failed_share: Share = 0.0
    when_failed: Mapping[ExpectedFailure, WhenFailed] = field(default_factory=dict)
    logprob_kind: Literal["full"] | None = "full"
    abort_timeout_s: Seconds = 30.0


def capacity(options: RolloutOptions, num_groups: int, *, is_requested: bool) -> int:
    """How many groups may be running or ready.

    Args:
        num_groups: groups of one batch.
        is_requested: a call waits for a batch now.
    """
    batch = math.ceil(num_groups * options.over_sampling)
    if options.mode == "sync":
        return batch if is_requested else 0
    if options.mode == "one_ahead":
        return batch
    # A group that waits for more batches than this would be stale before its delivery.
    return batch + num_groups * max(1, options.max_version_lag or 1)


def is_stale(options: RolloutOptions, sample: Sample, current: int | None) -> bool:
    """Whether a token of ``sample`` has a weight version that is not allowed.

    Engines keep to the lag for each request, and a finished sample grows older in its queue.

    Args:
        current: weight version of the policy now, or None while it is unknown.
    """
    versions = sample.versions
    if not versions or options.max_version_lag is None or current is None:
        return False
    lag = options.max_version_lag
    # A trainer that went back to a checkpoint has samples of weights that it has no more.
    return not current - lag <= min(versions) <= max(versions) <= current + lag


@options
class BatchPlan:
    """The size and sampling of a batch.

    Attributes:
        num_groups: prompts of one batch.
        group_size: samples per prompt.
    """

    num_groups: Positive
    group_size: Positive
    sampling: SamplingParams

    def __post_init__(self) -> None:
        check_rollout_sampling(self.sampling)


def check_rollout_sampling(sampling: SamplingParams) -> None:
    """Check the sampling parameters of a rollout.

    Raises:
        TypeError, ValueError: one is wrong.
    """
    check_sampling(sampling)
    if sampling.n != 1:
        raise wrong("n", sampling.n, "1: group_size sets the number of samples")
