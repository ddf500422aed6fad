"""What a stream of sample groups does next: begin, deliver, do anew.  Values in, values out.

Always true: no more groups are under way than ``capacity``; what is delivered is not staler than
allowed; of what is ready, the groups whose prompts came first go first.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollout.samples import Sample


class Mode(StrEnum):
    """When generation may run.

    ``sync``: while a batch is asked for; what is not needed is aborted.  ``one_ahead``: up to one
    batch, also between calls.  ``async``: all the time, up to the batches that staleness allows.
    """

    SYNC = "sync"
    ONE_AHEAD = "one_ahead"
    ASYNC = "async"


class WhenStale(StrEnum):
    """What becomes of a sample that is too old: its prompt is done anew, or dropped."""

    REDO = "redo"
    DROP = "drop"


def capacity(
    mode: Mode, num_groups: int, over_sampling: float, max_version_lag: int | None, is_asked: bool
) -> int:
    """How many groups may be under way or ready.

    Args:
        is_asked: a batch is being waited for now.
    """
    batch = math.ceil(num_groups * over_sampling)
    if mode is Mode.SYNC:
        return batch if is_asked else 0
    if mode is Mode.ONE_AHEAD:
        return batch
    # A group that waits for more batches than this would be too old when its turn comes.
    return batch + num_groups * max(1, 1 if max_version_lag is None else max_version_lag)


def may_begin(num_open: int, num_ready: int, num_unfinished: int, limit: int, most: int) -> bool:
    """Whether one more group is begun now.

    Args:
        num_unfinished: samples that are being generated, or wait for it.
        limit: samples that may be in flight.
        most: ``capacity``.
    """
    return num_open + num_ready < most and num_unfinished < limit


@dataclass(frozen=True, slots=True)
class Freshness:
    """What makes a sample too old.

    Attributes:
        current: weight version of the policy now; None while it is not known.
        max_lag: versions that a token may be behind; None for any.
        pin: the only version that is allowed; None for any.
    """

    current: int | None = None
    max_lag: int | None = None
    pin: int | None = None

    def is_stale(self, sample: Sample) -> bool:
        versions = sample.versions
        if not versions:
            return False
        if self.pin is not None and any(version != self.pin for version in versions):
            return True
        if self.max_lag is None or self.current is None:
            return False
        return min(versions) < self.current - self.max_lag


def deliverable(serials: Sequence[int], num_groups: int) -> list[int]:
    """Which of the ready groups make the batch, in order."""
    return sorted(serials)[:num_groups]


def seed_of(seed: int, serial: int, index: int, num_tries: int) -> int:
    """A sampling seed of its own for each sample, the same in every run."""
    return zlib.crc32(f"{seed}/{serial}/{index}/{num_tries}".encode()) & 0x7FFF_FFFF
