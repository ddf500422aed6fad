"""Rollout orchestration for colocated RL post-training.

Importing this starts nothing and needs neither ray nor torch.
"""

from __future__ import annotations

from typing import Literal

from engines.protocol import SamplingParams
from rollout.config import RolloutConfig
from rollout.driver.driver import Driver, Prompt, RolloutDriver
from rollout.driver.evaluation import EvalDataset
from rollout.driver.hooks import Hooks
from rollout.driver.options import RolloutOptions
from rollout.driver.session import Session
from rollout.driver.sources import PromptData
from rollout.errors import (
    ActorLost,
    ConfigError,
    EngineFailure,
    GenerationAborted,
    LifecycleError,
    PhaseFailed,
    PhaseTimeout,
    PlacementError,
    RolloutError,
    WeightError,
    WeightMismatch,
    WeightsUnavailable,
)
from rollout.handle import DeploymentHandle, OffloadWindow, ServerHandle
from rollout.pending import Pending
from rollout.types import Sample, SampleGroup, SampleStatus, ServerStatus, StepReport

__version__ = "0.1.0"


def launch(
    config: RolloutConfig, *, backend: Literal["local", "ray"] = "local"
) -> DeploymentHandle:
    """Start the servers of ``config`` and return when they serve.

    Args:
        backend: ``local`` runs everything in this process and its children; ``ray`` runs the
            same code as actors on the cluster of ``config.cluster``.

    Raises:
        ConfigError: a setting is wrong, or Ray is asked for and not installed.
        PlacementError: the engines do not fit.
        PhaseFailed: an engine did not start.  In every case nothing is left running.
    """
    if backend == "local":
        from rollout.local import launch_local

        return launch_local(config)
    if backend != "ray":
        raise ConfigError(f"backend = {backend!r}: must be 'local' or 'ray'")
    try:
        from rollout.actors.launch import launch_ray
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError(
            "backend = 'ray' needs Ray, which is not installed; "
            "pip install 'ray-rollout[ray]', or use backend='local'"
        ) from None
    return launch_ray(config)


__all__ = [
    "ActorLost",
    "ConfigError",
    "DeploymentHandle",
    "Driver",
    "EngineFailure",
    "EvalDataset",
    "GenerationAborted",
    "Hooks",
    "LifecycleError",
    "OffloadWindow",
    "Pending",
    "PhaseFailed",
    "PhaseTimeout",
    "PlacementError",
    "Prompt",
    "PromptData",
    "RolloutConfig",
    "RolloutDriver",
    "RolloutError",
    "RolloutOptions",
    "Sample",
    "SampleGroup",
    "SampleStatus",
    "SamplingParams",
    "ServerHandle",
    "ServerStatus",
    "Session",
    "StepReport",
    "WeightError",
    "WeightMismatch",
    "WeightsUnavailable",
    "launch",
]
