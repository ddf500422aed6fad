"""How all rows are measured: median GiB/s, and CPU seconds per GiB of this process and others."""

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
    """How fast ``act`` moves ``num_bytes``.

    Args:
        others: pids of processes that work for it.
        before: done before each repetition, and not counted.
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
    times = [psutil.Process(pid).cpu_times() for pid in others]
    return time.process_time() + sum(one.user + one.system for one in times)


def memcpy(num_bytes: int, repeats: int) -> Row:
    """From memory to memory that has been touched before: what nothing can be faster than."""
    import numpy

    source = numpy.ones(num_bytes, numpy.uint8)
    target = numpy.zeros(num_bytes, numpy.uint8)
    target[:] = source
    return rate(lambda: numpy.copyto(target, source), num_bytes, repeats)
