"""How every row is measured: median GiB/s, and CPU seconds per GiB of all processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import psutil

Row = dict[str, float]


def rate(
    act: Callable[[], object],
    num_bytes: int,
    repeats: int,
    *,
    others: Sequence[int] = (),
    before: Callable[[], object] = lambda: None,
) -> Row:
    """GiB/s and CPU seconds per GiB of ``act``, which moves ``num_bytes``.

    Args:
        others: pids of processes that take part in the work.
        before: called before each repetition; not counted.
    """
    seconds, cpu = [], []
    for _ in range(repeats):
        before()
        cpu_before, began = _cpu_s(others), time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
        cpu.append(_cpu_s(others) - cpu_before)
    gib = num_bytes / 2**30
    return {
        "gib_per_s": gib / statistics.median(seconds),
        "cpu_s_per_gib": statistics.median(cpu) / gib,
    }


def _cpu_s(others: Sequence[int]) -> float:
    all_times = [psutil.Process(pid).cpu_times() for pid in others]
    return time.process_time() + sum(times.user + times.system for times in all_times)


def memcpy(num_bytes: int, repeats: int) -> Row:
    """Copy by one thread between two arrays that were touched before: the yardstick."""
    import numpy

    source = numpy.ones(num_bytes, numpy.uint8)
    target = numpy.zeros(num_bytes, numpy.uint8)
    target[:] = source
    return rate(lambda: numpy.copyto(target, source), num_bytes, repeats)
