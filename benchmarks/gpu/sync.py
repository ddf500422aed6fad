"""Pushes of one model by a trainer to an engine on the same GPU, and whole steps with an offload.

Each push has other weights in every element, and is verified: those of an embedded engine by
fingerprints, those of SGLang by its checksums.  ``sync``: the engine
serves before and after.  ``step``: the engine gives its memory first (``offload``), and gets memory
and weights back (``onload``).  Seconds of the parts are those of ``StepReport``: ``make`` until the
tensors of a bucket are whole, ``handle`` until the engine can open it, ``apply`` until the engine
has it; ``update`` is all three together, and the last part, ``rest``, is what no phase counts.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.repeats import TimeLeft, repeat
from benchmarks.gpu.shapes import make_checkpoint
from benchmarks.report import Rows
from rollout.core.types import StepReport
from rollout.runtime.handle.pusher import Pusher
from tests.support.gpu.machine import Gpu, timed
from tests.support.gpu.policy import TIMEOUT_S, OneEngine, one_engine

Seconds = dict[str, float]
_UPDATE = ("make", "handle", "apply", "update")
_SYNC = ("pause_generation", "flush_cache", *_UPDATE, "verify", "continue_generation", "rest")
_OFFLOAD = ("offload", "onload", "pause_generation", "flush_cache", "release_memory_occupation")
_STEP = (
    *_OFFLOAD,
    "onload_weights",
    *_UPDATE,
    "verify",
    "onload_kv",
    "continue_generation",
    "rest",
)
_STAGES = {"gather": "make", "copy": "handle", "engine": "apply"}
# A part of the benchmark must end where a command may take ten minutes.
_MOST_S = 100.0
_POLL_S = 0.005


def measure(
    name: str,
    gpu: Gpu,
    folder: Path,
    *,
    shape: str,
    engine: Mapping[str, Any],
    repeats: int,
    left: TimeLeft,
    is_tiny: bool,
) -> dict[str, Any]:
    """The rows of one family.

    Args:
        shape: of ``SHAPES``.
        engine: settings of the engine on the GPU.
    """
    rows = Rows(f"gpu.{name}")
    model = folder / name
    model.mkdir()
    rows["tensors"], rows["bytes"] = make_checkpoint(model, shape, is_tiny=is_tiny)
    gpu.settle()  # a program that has ended may have been on it
    before = _used_by_others(gpu)
    started = time.monotonic()
    with _policy(gpu, model, folder / f"{name}-logs", engine) as (policy, pusher):
        rows["start_s"] = time.monotonic() - started
        pushing = _Pushing(policy, pusher)
        pushing.sync()  # the first makes what later ones reuse
        synced = _row(repeat(pushing.sync, repeats, left.share(0.3, _MOST_S)), _SYNC)
        rows["sync"] = synced | {"gib_per_s": rows["bytes"] / 2**30 / synced["median_s"]}
        pushing.step()
        rows["step"] = _row(repeat(pushing.step, repeats, left.share(0.5, _MOST_S)), _STEP)
        rows["peak_bytes"] = _peaks(pushing, before)
        rows["routes"] = " ".join(sorted(pushing.routes))
        rows["verified_by"] = " ".join(sorted(pushing.verified_by))
    return rows


@contextmanager
def _policy(
    gpu: Gpu, model: Path, logs: Path, engine: Mapping[str, Any]
) -> Iterator[tuple[OneEngine, Pusher]]:
    with (
        one_engine(gpu, model, logs, engine, transport="auto") as policy,
        policy.handle.pusher() as pusher,
    ):
        for tensor in policy.tensors.values():
            tensor.normal_(std=0.02)
        yield policy, pusher


class _Pushing:
    """What a trainer of this model does, time and again.

    Attributes:
        routes: by which its pushes went.
        verified_by: what showed that they arrived.
    """

    def __init__(self, policy: OneEngine, pusher: Pusher) -> None:
        self.policy = policy
        self.routes: set[str] = set()
        self.verified_by: set[str] = set()
        self._pusher = pusher

    def sync(self) -> Seconds:
        """Seconds of one push by part, and in all."""
        for tensor in self.policy.tensors.values():
            tensor.neg_()
        reports: list[StepReport] = []
        total = timed(lambda: reports.append(self._pusher.push(self.policy.tensors)))
        self.verified_by |= _checked(reports[0])
        self.routes |= {stage.route for stage in reports[0].push_stages if stage.route}
        found = _parts(reports[0])
        return found | {"total": total, "rest": total - sum(reports[0].phase_s.values())}

    def step(self) -> Seconds:
        """The same of a step: the engine's memory is the trainer's in the middle of it."""
        reports: list[StepReport] = []
        offload = timed(lambda: reports.append(self.offload()))
        synced = self.sync()
        onload = synced.pop("total")
        found = {"offload": offload, "onload": onload, "total": offload + onload}
        return _parts(reports[0]) | synced | found

    def offload(self) -> StepReport:
        return self.policy.handle.offload().result(TIMEOUT_S)


def _checked(report: StepReport) -> set[str]:
    """What its weights were verified by; every engine took the push."""
    engines = [one for phase in report.reports for one in phase.engines]
    assert not [one for one in engines if one.failure], engines
    verified = {one.verified_by for one in engines if one.verified_by}
    assert "fingerprint" in verified, f"verified by {verified}"
    return verified


def _parts(report: StepReport) -> Seconds:
    found = {name.replace("update_weights", "update"): s for name, s in report.phase_s.items()}
    for stage in report.push_stages:
        found[_STAGES[stage.stage]] = stage.elapsed_s
    return found


def _row(seconds: Sequence[Seconds], parts: Sequence[str]) -> Seconds:
    """Medians, and the worst in all."""
    totals = [one["total"] for one in seconds]
    row = {f"{name}_s": statistics.median(one.get(name, 0.0) for one in seconds) for name in parts}
    most = {"median_s": statistics.median(totals), "worst_s": max(totals)}
    return most | row | {"repeats": len(seconds)}


def _peaks(pushing: _Pushing, before: int) -> dict[str, int]:
    """Beyond the tensors of each, on the GPU: while a push is made, in a run that is not timed.

    The engine's is what NVML says without what torch holds here, and without what was used before
    the engine started.
    """
    policy = pushing.policy
    gpu, held = policy.gpu, sum(policy.memory_by_tag().values())
    own = sum(tensor.nbytes for tensor in policy.tensors.values()) if gpu.is_real else 0
    found: dict[str, int] = {}
    for name, work in (("sync", pushing.sync), ("step", pushing.step)):
        if gpu.is_real:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        engine = peak_during(work, lambda: _used_by_others(gpu)) - before
        trainer = torch.cuda.max_memory_reserved() if gpu.is_real else 0
        found |= {f"{name}_trainer": trainer - own, f"{name}_engine": engine - held}
    return found


def _used_by_others(gpu: Gpu) -> int:
    return gpu.used_bytes() - (torch.cuda.memory_reserved() if gpu.is_real else 0)


def peak_during(work: Callable[[], object], read: Callable[[], int]) -> int:
    """The highest of what ``read`` returns every few milliseconds."""
    found = [read()]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_POLL_S):
            found[0] = max(found[0], read())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        is_over.set()
        thread.join()
    return found[0]
