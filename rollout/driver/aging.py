"""What becomes of a group whose tokens are of weights too old: it begins anew, or is dropped."""

from __future__ import annotations

from enum import Enum, auto

from rollout.driver.metrics import StepStats
from rollout.driver.options import RolloutOptions
from rollout.driver.partial import restart
from rollout.driver.plan import Freshness, WhenStale
from rollout.driver.work import Work
from rollout.samples import Sample


class Age(Enum):
    """What was found when a group was looked at."""

    FRESH = auto()
    RENEWED = auto()
    TOO_OLD = auto()


def renew(work: Work, freshness: Freshness, options: RolloutOptions, stats: StepStats) -> Age:
    """Make what is too old begin anew, as often as that is allowed."""
    stale = [place for place, one in enumerate(work.samples) if freshness.is_stale(one)]
    if not stale:
        return Age.FRESH
    if work.num_redone >= options.max_redone or options.when_stale is WhenStale.DROP:
        return Age.TOO_OLD
    work.num_redone += 1
    work.is_accepted = False
    stats.num_redone += len(stale)
    for place in stale:
        restart(work.samples[place])
        work.judged.discard(place)
    return Age.RENEWED


def begins_anew(
    work: Work, sample: Sample, freshness: Freshness, options: RolloutOptions, stats: StepStats
) -> bool:
    """Whether a sample that was cut off is too old to go on.

    Its group is dropped in the end if that happens too often.
    """
    most = options.max_redone * len(work.samples)
    if work.num_restarted >= most or not freshness.is_stale(sample):
        return False
    work.num_restarted += 1
    stats.num_redone += 1
    return True
