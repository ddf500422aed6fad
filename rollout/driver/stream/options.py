"""Settings of a rollout, and how many groups and how old weights they allow.

Always true: the values of settings are checked when they are made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from engines.protocol import SamplingParams
from rollout.core.arguments import check_kind, check_number, check_positive, wrong
from rollout.core.samples import Sample
from rollout.driver.client.sampling_check import check_sampling


class Mode(StrEnum):
    """When generation may run.

    ``sync``: only during a call for a batch; what the batch does not need is aborted.
    ``one_ahead``: up to one batch, also between calls.  ``async``: always, up to the number of
    batches that staleness allows.
    """

    SYNC = "sync"
    ONE_AHEAD = "one_ahead"
    ASYNC = "async"


class WhenStale(StrEnum):
    """What happens to a group with a stale sample: generate it again, or drop it."""

    REDO = "redo"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """Settings of a rollout from a source.

    Attributes:
        mode: ``sync``, ``one_ahead`` or ``async``; see ``Mode``.
        over_sampling: groups to run per wanted group; ready groups beyond the batch go to the
            next batch.
        partial: samples that are unfinished when the batch is full keep their tokens and continue
            in the next batch; if False, they restart.
        max_version_lag: weight versions that the oldest token of a sample may be behind; None for
            no limit.
        when_stale: whether stale groups are generated again (``redo``) or dropped (``drop``).
        max_redone: how often a stale group is generated again before it is dropped.
        max_rejected: groups that filters may drop for one batch; None: 10 per wanted group.
        max_failed_share: allowed share of failed samples in a batch; above it the call raises, and
            the finished samples stay for the next call.
        abort_timeout_s: seconds in which aborted requests must end.
        pin: the only weight version that a token may have.

    Raises:
        ConfigError: a value is not one of these; it is named.
    """

    mode: Mode | str = Mode.SYNC
    over_sampling: float = 1.0
    partial: bool = True
    max_version_lag: int | None = None
    when_stale: WhenStale | str = WhenStale.REDO
    max_redone: int = 3
    max_rejected: int | None = None
    max_failed_share: float = 0.0
    abort_timeout_s: float = 30.0
    pin: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("mode", Mode), ("when_stale", WhenStale)):
            value = getattr(self, name)
            if value not in list(kind):
                raise wrong(name, value, f"one of {', '.join(kind)}")
            object.__setattr__(self, name, kind(value))
        check_kind("partial", self.partial, bool, "True or False")
        check_number("over_sampling", self.over_sampling, least=1)
        check_number("max_redone", self.max_redone, least=0, whole=True)
        for name in ("max_version_lag", "max_rejected", "pin"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), least=0, whole=True)
        check_number("max_failed_share", self.max_failed_share, least=0)
        if self.max_failed_share > 1:
            raise wrong("max_failed_share", self.max_failed_share, "a share between 0 and 1")
        check_positive("abort_timeout_s", self.abort_timeout_s)


def capacity(options: RolloutOptions, num_groups: int, *, is_requested: bool) -> int:
    """How many groups may be running or ready.

    Args:
        num_groups: groups of one batch.
        is_requested: a call waits for a batch now.
    """
    batch = math.ceil(num_groups * options.over_sampling)
    if options.mode is Mode.SYNC:
        return batch if is_requested else 0
    if options.mode is Mode.ONE_AHEAD:
        return batch
    # A group that waits for more batches than this would be stale before its delivery.
    return batch + num_groups * max(1, options.max_version_lag or 1)


def is_stale(options: RolloutOptions, sample: Sample, current: int | None) -> bool:
    """Whether a token of ``sample`` has a weight version that is not allowed.

    Args:
        current: weight version of the policy now; None while it is unknown.
    """
    versions = sample.versions
    if options.pin is not None and any(version != options.pin for version in versions):
        return True
    if not versions or options.max_version_lag is None or current is None:
        return False
    return min(versions) < current - options.max_version_lag


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The size and sampling of a batch.

    Attributes:
        num_groups: prompts of one batch.
        group_size: samples per prompt.
    """

    num_groups: int
    group_size: int
    sampling: SamplingParams

    def __post_init__(self) -> None:
        check_number("num_groups", self.num_groups, least=1, whole=True)
        check_number("group_size", self.group_size, least=1, whole=True)
        check_rollout_sampling(self.sampling)


def check_rollout_sampling(sampling: SamplingParams) -> None:
    """Check the sampling parameters of a rollout.

    Raises:
        ConfigError: one is wrong.
    """
    check_sampling(sampling)
    if sampling.n != 1:
        raise wrong("n", sampling.n, "1: group_size sets the number of samples")
