"""Deltas by density: bytes against information, and seconds beside whole tensors.

Before each push, a share of the elements of every tensor is changed.  The information is six bytes
for each of them: a position and a bfloat16 value.  Seconds are of pushes to one engine on this host
(see ``push``), from the trainer's tensors until the engine has them; no link is slow here.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Rows
from benchmarks.weights.push import VERSIONS, Pushing, receiver, specs_of
from engines.process.background import in_own_thread
from rollout.config import Transport
from rollout.core.pending import Pending
from rollout.core.types import PushStage, StepReport
from rollout.weights.push.push import PushRequest
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.ranks.leader import push_of_one_rank
from rollout.weights.routes.route import EnginePlace
from tests.support.still_server import HERE, StillServer, server_config

DENSITIES = (0.001, 0.01, 0.03, 0.1, 0.5)
TRANSPORTS = (Transport.BY_VALUE, Transport.SHARED_MEMORY)
ENCODINGS = ("full", "delta", "auto")
_BYTES_OF_CHANGE = 6


def change(tensors: Mapping[str, torch.Tensor], density: float) -> int:
    """Change about this share of the elements of each tensor; returns how many they were."""
    num_changed = 0
    for tensor in tensors.values():
        flat = tensor.view(-1).view(torch.int16)
        # Some are drawn several times; to draw each once takes longer than the push.
        num_drawn = max(1, round(-math.log1p(-density) * flat.numel()))
        at = torch.randint(flat.numel(), (num_drawn,)).unique()
        flat[at] ^= 1
        num_changed += len(at)
    return num_changed


class _Server(StillServer):
    def record_push(self, spans: Any) -> None:
        """Nothing is recorded."""


class Changing(Pushing):
    """Changes a share of the tensors before each push, and sends it in one encoding."""

    def begin(self, transport: Transport, encoding: str) -> None:
        for kept in self._rank.encodings.values():
            kept.begin(None)
        self._version = None
        self._rank.config = server_config(
            self._folder, transport=transport, encoding=encoding, stream=True
        )

    def change(self, density: float) -> int:
        """Change so many; returns how many they were."""
        return change(self._tensors, density)

    def pushed(self) -> StepReport:
        place = EnginePlace("engine", HERE, encodings=ENCODINGS, weight_version=self._version)
        version = next(VERSIONS)
        request = PushRequest(self._tensors, version)
        server = _Server(engines=[place])
        with push_of_one_rank(self._rank, server, request, may_stream=True) as made:
            report = made.send(
                lambda weights: Pending(in_own_thread(partial(self._run, weights), "push"))
            )
            found = report.result(300)
        self._version = version
        return found

    def _run(self, push: WeightPush) -> StepReport:
        self._runner.run(self._send(push))
        return StepReport()


def measure(num_bytes: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    specs = specs_of("dense", num_bytes)
    tensors = {spec.name: torch.randn(spec.shape).to(torch.bfloat16) for spec in specs}
    rows = Rows("delta")
    rows["bytes"] = sum(tensor.nbytes for tensor in tensors.values())
    with tempfile.TemporaryDirectory() as folder, receiver(specs, Path(folder)) as (_, port):
        pushing = Changing(tensors, port, Path(folder))
        try:
            for transport in TRANSPORTS:
                for density in DENSITIES:
                    for encoding in ENCODINGS:
                        name = f"{transport}_{density:g}_{encoding}"
                        rows[name] = _row(pushing, transport, density, encoding, repeats)
                        pushing.check()
        finally:
            pushing.close()
    return rows


def _row(
    pushing: Changing, transport: Transport, density: float, encoding: str, repeats: int
) -> dict[str, Any]:
    pushing.begin(transport, encoding)
    pushing.pushed()  # whole tensors, into memory that later pushes use again
    if encoding == "auto":  # which has measured the density then
        pushing.change(density)
        pushing.pushed()
    seconds = []
    for _ in range(repeats):
        num_changed = pushing.change(density)
        began = time.perf_counter()
        report = pushing.pushed()
        seconds.append(time.perf_counter() - began)
    sent = _copied(report)
    return {
        "seconds": statistics.median(seconds),
        "sent_bytes": sent.num_bytes,
        "of_information": sent.num_bytes / (num_changed * _BYTES_OF_CHANGE),
        "is_delta": int(sent.route != transport),
    }


def _copied(report: StepReport) -> PushStage:
    (stage,) = [one for one in report.push_stages if one.stage == "copy"]
    return stage
