"""Offloads and onloads of a deployment that nobody trains, for ``rollout bench``.

Always true: engines get back the weights they were started with, under a version that grows; what
is told of the cycles comes from the run's timeline, as in ``rollout trace``.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.config import RolloutConfig, ServerConfig, WeightUpdate
from rollout.handle import DeploymentHandle
from rollout.timeline.analysis import Slowest, Step
from rollout.timeline.span import Span
from rollout.weights.manifest import Manifest, read_checkpoint_manifest
from rollout.weights.push import WeightPush
from rollout.weights.transports.by_path import ByPath


def cycle(deployment: DeploymentHandle, config: RolloutConfig) -> None:
    """One offload and onload of all servers, with nobody in between."""
    versions = {name: one.weight_version for name, one in deployment.status().result().items()}
    pushes = {
        name: push_of_checkpoint(server, versions[name] + 1)
        for name, server in config.servers.items()
        if server.weights.update is WeightUpdate.FULL
    }
    deployment.offload().result()
    deployment.onload(pushes).result()


def push_of_checkpoint(server: ServerConfig, version: int) -> WeightPush:
    """A push that each engine reads from the model's own folder: no trainer, no tensors here."""
    manifest = read_checkpoint_manifest(server.model_path) or Manifest({})
    folder = str(Path(server.model_path).absolute())
    return WeightPush(version, manifest, [{"path": folder}], ByPath())


def step_of(told: Mapping[str, Any]) -> Step:
    """A step as a page tells of it."""
    known = {name: value for name, value in told.items() if name != "number"}
    known["slowest"] = {phase: Slowest(**one) for phase, one in told["slowest"].items()}
    known["failures"] = tuple(Span.from_dict(one) for one in told["failures"])
    return Step(**known)


def boundary(steps: Sequence[Step]) -> dict[str, Any]:
    """What these steps cost: without generation, by phase, and whom each phase waited for."""
    lost_s = [one.lost_s for one in steps]
    phases = list(dict.fromkeys(phase for one in steps for phase in one.phase_s))
    return {
        "num_cycles": len(steps),
        "lost_median_s": statistics.median(lost_s) if steps else None,
        "lost_longest_s": max(lost_s, default=None),
        "phases": {phase: _of_phase(phase, steps) for phase in phases},
        "failures": [
            f"engine {span.engine_id}: {span.name}: {span.said}"
            for one in steps
            for span in one.failures
        ],
    }


def _of_phase(phase: str, steps: Sequence[Step]) -> dict[str, Any]:
    """``slowest_engine`` is the one that was waited for longest, over all steps."""
    took_s = [one.phase_s[phase] for one in steps if phase in one.phase_s]
    slowest = [one.slowest[phase] for one in steps if phase in one.slowest]
    waited_s: Counter[str] = Counter()
    for one in slowest:
        waited_s[one.engine_id] += one.elapsed_s  # type: ignore[assignment]
    who = max(waited_s, key=lambda engine_id: waited_s[engine_id], default="")
    return {
        "median_s": statistics.median(took_s),
        "longest_s": max(took_s),
        "slowest_engine": who,
        "slowest_in": sum(one.engine_id == who for one in slowest),
        "others_waited_s": statistics.median(one.waited_s for one in slowest) if slowest else 0.0,
    }
