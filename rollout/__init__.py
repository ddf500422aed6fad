"""Rollout orchestration for colocated RL post-training.

Importing this package starts nothing and needs neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

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
from rollout.core.types import EngineRank, ServerStatus, StepReport, TrainerSlot
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
    config: RolloutConfig,
    *,
    backend: Literal["local", "ray"] = "local",
    placement_group: Any = None,
    bundles: Sequence[int] | Mapping[int, int | str] | None = None,
) -> DeploymentHandle:
    """Start the servers of ``config`` and return when they are serving.

    A server with engines on the GPUs of an earlier server is offloaded instead.

    Args:
        backend: ``local`` runs everything in this process and its children; ``ray`` runs the
            same code as actors on the cluster of ``config.cluster``.
        placement_group: an existing Ray placement group to run the engines in, instead of a new
            one.  It is never removed.
        bundles: the indices of the only bundles to use in it; by default all with a GPU.  A
            mapping has the GPU id of each, which is needed if actors already hold whole GPUs.

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
        if placement_group is not None or bundles is not None:
            raise ConfigError("placement_group and bundles need backend='ray'")
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
    return launch_ray(config, placement_group=placement_group, bundles=bundles)


__all__ = [
    "ActorLost",
    "ConfigError",
    "DeploymentHandle",
    "Driver",
    "EngineFailure",
    "EngineRank",
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
    "TrainerSlot",
    "WeightError",
    "WeightMismatch",
    "WeightsUnavailable",
    "launch",
]
