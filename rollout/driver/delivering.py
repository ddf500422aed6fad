"""A full batch on its last yards: post-processing, and what happens when too much of it failed."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from rollout.driver.hooks import Hooks
from rollout.driver.partial import restart
from rollout.driver.work import Work
from rollout.errors import RolloutError
from rollout.samples import SampleGroup, SampleStatus, all_samples


def post_process(hooks: Hooks, groups: list[SampleGroup]) -> None:
    """Give the batch to the hook; all of it fails if the hook raises."""
    if hooks.post_process is None:
        return
    try:
        hooks.post_process(groups)
    except Exception as error:
        for sample in all_samples(groups):
            sample.fail(f"post_process raised {error!r}", traceback.format_exc())


def check_failures(groups: Sequence[SampleGroup], max_failed_share: float) -> None:
    """Refuse a batch of which too much failed.

    Raises:
        RolloutError: with the error of the first failed sample.
    """
    samples = list(all_samples(groups))
    failed = [sample for sample in samples if sample.status is SampleStatus.FAILED]
    if len(failed) > max_failed_share * len(samples):
        raise RolloutError(
            f"{len(failed)} of {len(samples)} samples failed; the first: {failed[0].error}"
        )


def take_back(work: Work) -> bool:
    """Make a group's failed samples begin anew; whether there were any."""
    failed = [
        place for place, sample in enumerate(work.samples) if sample.status is SampleStatus.FAILED
    ]
    for place in failed:
        restart(work.samples[place])
        work.judged.discard(place)
    work.is_accepted = not failed
    return bool(failed)
