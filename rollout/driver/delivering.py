"""A batch on its last yards: post-processing, and its end where too much failed or was dropped."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence

from rollout.driver.hooks import Hooks
from rollout.driver.partial import restart
from rollout.driver.work import Work
from rollout.errors import RolloutError
from rollout.samples import SampleGroup, SampleStatus, all_samples

_REJECTED_PER_GROUP = 10


def check_rejections(
    rejected: Counter[str], max_rejected: int | None, *, num_kept: int, num_wanted: int
) -> None:
    """Give up a batch for which filters dropped too much.

    Args:
        rejected: groups that were dropped, by reason.
        max_rejected: None for ten groups per group that is wanted.

    Raises:
        RolloutError: with the reasons.
    """
    most = _REJECTED_PER_GROUP * num_wanted if max_rejected is None else max_rejected
    if rejected.total() > most:
        reasons = ", ".join(f"{reason}: {num}" for reason, num in rejected.most_common())
        raise RolloutError(
            f"filters dropped {rejected.total()} groups, more than {most}, and kept "
            f"{num_kept} of {num_wanted} wanted ({reasons})"
        )


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
