"""Rollout orchestration for colocated RL post-training.

Importing this package starts nothing and needs neither ray nor torch.
"""

from __future__ import annotations

from typing import Literal

from engines.protocol import SamplingParams
from rollout.config import RolloutConfig
from rollout.core.errors import (
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
from rollout.core.moved_names import redirect_old_paths
from rollout.core.pending import Pending
from rollout.core.samples import Sample, SampleGroup, SampleStatus
from rollout.core.types import ServerStatus, StepReport
from rollout.driver import (
    Driver,
    EvalDataset,
    Hooks,
    Prompt,
    PromptData,
    RolloutDriver,
    RolloutOptions,
    Session,
)
from rollout.runtime.handle import DeploymentHandle, OffloadWindow, ServerHandle

redirect_old_paths()

__version__ = "0.1.0"


def launch(
    config: RolloutConfig, *, backend: Literal["local", "ray"] = "local"
) -> DeploymentHandle:
    """Start the servers of ``config`` and return when they are serving.

    Args:
        backend: ``local`` runs everything in this process and its children; ``ray`` runs the
            same code as actors on the cluster of ``config.cluster``.

    Raises:
        ConfigError: a setting is wrong, or ``backend`` is ``ray`` and Ray is not installed.
        PlacementError: the engines do not fit on the machines.
        PhaseFailed: an engine did not start.

    After an error, nothing is running.
    """
    if not isinstance(config, RolloutConfig):
        raise ConfigError(
            f"launch takes a RolloutConfig, not a {type(config).__name__}; RolloutConfig.from_dict "
            "and from_file make one"
        )
    if backend == "local":
        from rollout.runtime.local import launch_local

        return launch_local(config)
    if backend != "ray":
        raise ConfigError(f"backend = {backend!r}: must be 'local' or 'ray'")
    try:
        from rollout.runtime.ray.launch import launch_ray
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
