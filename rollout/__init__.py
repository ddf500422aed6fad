"""Rollout orchestration for colocated RL post-training.

Importing this package starts nothing and needs neither ray nor torch.  A name is imported at its
first use: every process that imports a part of this package runs this file, and most use one name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollout.core import VERSION

if TYPE_CHECKING:
    from engines.protocol import FinishReason, GenerateReply, VersionSpan
    from rollout.config import (
        AgentsConfig,
        ClusterConfig,
        EngineConfig,
        GroupConfig,
        HealthConfig,
        LifecycleConfig,
        PageConfig,
        RolloutConfig,
        RouterConfig,
        ServerConfig,
        StoreConfig,
        TimelineConfig,
        VerifyConfig,
        WeightsConfig,
    )
    from rollout.core.errors import (
        ActorLost,
        ConfigError,
        EngineFailure,
        GenerationAborted,
        GenerationFailed,
        LifecycleError,
        LogprobMismatch,
        Mistake,
        PhaseFailed,
        PhaseTimeout,
        PlacementError,
        RankFailure,
        RolloutError,
        VersionUnavailable,
        WeightError,
        WeightMismatch,
        WeightsUnavailable,
    )
    from rollout.core.pending import Pending
    from rollout.core.samples import EngineSpan, Sample, SampleFailure, SampleGroup, SampleStatus
    from rollout.core.types import (
        DraftFigures,
        EngineRank,
        EngineReport,
        EngineStatus,
        GroupStatus,
        PhaseReport,
        PushStage,
        ServerStatus,
        StepReport,
        StoreStatus,
        TrainerSlot,
        UnchangedWeights,
    )
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
    from rollout.driver.client.agent_session import AgentSession
    from rollout.driver.client.sample_requests import SampleOptions, VersionOptions
    from rollout.driver.client.sampling_check import SamplingParams
    from rollout.driver.logprobs.comparison import LogprobReport, compare_logprobs
    from rollout.driver.logprobs.correction import (
        correction_metrics,
        importance_weights,
        rejection_mask,
    )
    from rollout.driver.logprobs.gap_figures import GapFigures
    from rollout.driver.logprobs.mismatch import Mismatch
    from rollout.driver.logprobs.token_logprobs import token_logprobs
    from rollout.runtime.calls.phase_commands import PhaseCommands
    from rollout.runtime.calls.sample_client import ReplyStream
    from rollout.runtime.calls.server_engines import ServerEngines
    from rollout.runtime.calls.weight_checks import WeightChecks
    from rollout.runtime.handle import DeploymentHandle, OffloadWindow, RunHandle, ServerHandle
    from rollout.runtime.handle.pusher import Pusher
    from rollout.weights.push.push import Push
    from rollout.weights.tensors import NamedTensors, NameMap, canary_logprobs, fp8_block_quantiser
    from rollout.weights.tensors.adapters import merged

# The same names at run time.
_HOMES = {
    "engines.protocol": "FinishReason GenerateReply VersionSpan",
    "rollout.config": (
        "AgentsConfig ClusterConfig EngineConfig GroupConfig HealthConfig"
        " LifecycleConfig PageConfig RolloutConfig RouterConfig ServerConfig StoreConfig"
        " TimelineConfig VerifyConfig WeightsConfig"
    ),
    "rollout.core.errors": (
        "ActorLost ConfigError EngineFailure GenerationAborted GenerationFailed"
        " LifecycleError LogprobMismatch Mistake PhaseFailed PhaseTimeout PlacementError"
        " RankFailure RolloutError VersionUnavailable WeightError WeightMismatch"
        " WeightsUnavailable"
    ),
    "rollout.core.pending": "Pending",
    "rollout.core.samples": "EngineSpan Sample SampleFailure SampleGroup SampleStatus",
    "rollout.core.types": (
        "DraftFigures EngineRank EngineReport EngineStatus GroupStatus PhaseReport PushStage"
        " ServerStatus StepReport StoreStatus TrainerSlot UnchangedWeights"
    ),
    "rollout.driver": (
        "Driver EvalDataset Hooks Prompt PromptData RolloutDriver RolloutOptions Session"
    ),
    "rollout.driver.client.agent_session": "AgentSession",
    "rollout.driver.client.sample_requests": "SampleOptions VersionOptions",
    "rollout.driver.client.sampling_check": "SamplingParams",
    "rollout.driver.logprobs.comparison": "LogprobReport compare_logprobs",
    "rollout.driver.logprobs.correction": "correction_metrics importance_weights rejection_mask",
    "rollout.driver.logprobs.gap_figures": "GapFigures",
    "rollout.driver.logprobs.mismatch": "Mismatch",
    "rollout.driver.logprobs.token_logprobs": "token_logprobs",
    "rollout.runtime.calls.phase_commands": "PhaseCommands",
    "rollout.runtime.calls.sample_client": "ReplyStream",
    "rollout.runtime.calls.server_engines": "ServerEngines",
    "rollout.runtime.calls.weight_checks": "WeightChecks",
    "rollout.runtime.handle": "DeploymentHandle OffloadWindow RunHandle ServerHandle",
    "rollout.runtime.handle.pusher": "Pusher",
    "rollout.weights.push.push": "Push",
    "rollout.weights.tensors": "NamedTensors NameMap canary_logprobs fp8_block_quantiser",
    "rollout.weights.tensors.adapters": "merged",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__version__ = VERSION


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOME})


def launch(
    config: RolloutConfig,
    *,
    backend: Literal["local", "ray"] = "local",
    placement_group: Any = None,
    bundles: Sequence[int] | Mapping[int, int | str] | None = None,
    expect_version: int = 0,
    wait: bool = True,
    detached: bool = False,
) -> DeploymentHandle:
    """Start the servers of ``config`` and return when they are serving.

    A server with engines on the GPUs of an earlier server is offloaded instead.

    Args:
        config: what to start; see the configuration reference.
        backend: ``local`` runs everything in this process and its children; ``ray`` runs the
            same code as actors on the cluster of ``config.cluster``.
        placement_group: an existing Ray placement group to run the engines in, instead of a new
            one; or a list of this one.  It is never removed.
        bundles: the indices of the only bundles to use in it; by default all with a GPU.  A
            mapping has the GPU id of each, which is needed if actors already hold whole GPUs.
        expect_version: of a run that continues, the weight version at which it goes on.  Engines
            start with ``model_path``, so the gate stays closed until a push of this version or a
            newer one; only frozen servers serve at once.
        wait: until the servers serve.  False returns while they start: ``deployment.ready()`` is
            the rest of the launch, with its error.
        detached: with ``ray``: the servers go on when this script ends, however it does.  A new
            script finds them with ``connect``; the handle's ``stop`` and ``rollout stop RUN --ray``
            end them, and a ``with`` block of the handle does not.  The cluster must outlive the
            script, too.

    Raises:
        ConfigError: a setting is wrong, or ``backend`` is ``ray`` and Ray is not installed; or a
            detached run of this id lives.
        TypeError, ValueError: another argument is wrong.
        PlacementError: the engines do not fit on the machines.
        PhaseFailed: an engine did not start.

    After an error, nothing is running.
    """
    _check_launch(config, expect_version)
    config = config.with_local_models()
    if os.environ.get("ROLLOUT_REPLAY"):
        from rollout.config.fakes import with_fakes

        config = with_fakes(config, keeps_gpus=backend == "ray")
        detached = False  # no engines of a later script are in a replay
    if backend == "local":
        if placement_group is not None or bundles is not None:
            raise ValueError("placement_group and bundles need backend='ray'")
        if detached:
            raise ValueError(
                "detached=True needs backend='ray': without Ray the servers run in this process, "
                "and end with it"
            )
        from rollout.runtime.local import launch_local

        return launch_local(config, expect_version=expect_version, wait=wait)
    if backend != "ray":
        raise ValueError(f"backend = {backend!r}: must be 'local' or 'ray'")
    with _needing_ray():
        from rollout.runtime.ray.launch import launch_ray
    return launch_ray(
        config,
        placement_group=placement_group,
        bundles=bundles,
        expect_version=expect_version,
        wait=wait,
        detached=detached,
    )


def _check_launch(config: Any, expect_version: Any) -> None:
    from rollout.config import RolloutConfig
    from rollout.config.sources.environment import set_log_level
    from rollout.core.arguments import wrong

    set_log_level()
    if not isinstance(config, RolloutConfig):
        raise TypeError(
            f"launch takes a RolloutConfig, not a {type(config).__name__}; RolloutConfig.from_dict "
            "and from_file make one"
        )
    if not isinstance(expect_version, int) or expect_version < 0:
        raise wrong("expect_version", expect_version, "a weight version, from 0")


def connect(
    run: str | Path,
    *,
    backend: Literal["local", "ray"] | None = None,
    address: str = "",
    key: str = "",
    namespace: str = "rollout",
) -> RunHandle:
    """The servers of a run that another process has launched, by name.

    From any process: a trainer's rank, a Ray actor, a notebook.  The run goes on when this process
    ends.  A run that was launched with ``detached`` outlives its script: of it this returns a
    ``DeploymentHandle``, by which a new script goes on, with ``placement_group``,
    ``trainer_slots`` and ``stop``.  Only the launching process can stop any other run.

    Args:
        run: the run's folder or that of one of its servers, or its id if the folder is
            ``runs/<id>``; under Ray its id.
        backend: None looks for a local launch, then for actors if Ray is initialized here.
        address: of a local launch, ``host:port``, with ``key``: ``control`` and ``key`` in a
            server's ``journal.json``; or of the Ray cluster, by default the one that is found.
        namespace: Ray's, as in ``cluster.namespace``.

    Raises:
        ConfigError: there is no such run, or it refuses the key.
        ValueError: an argument is wrong.
        ActorLost: the launching process has ended.
        TimeoutError: a detached run waits for its place on the cluster.
    """
    from rollout.config.run_dir import JOURNAL_FILE
    from rollout.config.sources.environment import set_log_level
    from rollout.core.arguments import wrong
    from rollout.core.errors import ConfigError
    from rollout.runtime.connect import connect_local

    set_log_level()
    if not str(run):
        raise wrong("run", run, "the run's folder or its id")
    if backend not in (None, "local", "ray"):
        raise ValueError(f"backend = {backend!r}: must be 'local' or 'ray'")
    if backend == "ray" and key:
        raise ValueError("key is of a local launch, not of a Ray cluster; leave it out")
    if os.environ.get("ROLLOUT_REPLAY"):
        from rollout.config.fakes import replay_of

        run = replay_of(run)
    if backend != "ray" and (found := connect_local(run, address, key)):
        return found
    if backend == "local" or not (backend or _has_joined_ray()):
        raise ConfigError(
            f"no launch of run {str(run)!r} is found: no server that takes calls has a "
            f"{JOURNAL_FILE} in {run} or runs/{run}. "
            "Give the run's folder, or address and key from that file; for a run on a Ray cluster, "
            "backend='ray'"
        )
    with _needing_ray():
        from rollout.runtime.ray.find_servers import connect_run
    return connect_run(str(run), address=address or "auto", namespace=namespace)


def _has_joined_ray() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


@contextmanager
def _needing_ray() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        from rollout.core.errors import ConfigError
        from rollout.core.optional_deps import install_command

        raise ConfigError(
            f"backend = 'ray' needs Ray, which is not installed; {install_command('ray')}, or use "
            "backend='local'"
        ) from None


__all__ = [
    "ActorLost",
    "AgentSession",
    "AgentsConfig",
    "ClusterConfig",
    "ConfigError",
    "DeploymentHandle",
    "DraftFigures",
    "Driver",
    "EngineConfig",
    "EngineFailure",
    "EngineRank",
    "EngineReport",
    "EngineSpan",
    "EngineStatus",
    "EvalDataset",
    "FinishReason",
    "GapFigures",
    "GenerateReply",
    "GenerationAborted",
    "GenerationFailed",
    "GroupConfig",
    "GroupStatus",
    "HealthConfig",
    "Hooks",
    "LifecycleConfig",
    "LifecycleError",
    "LogprobMismatch",
    "LogprobReport",
    "Mismatch",
    "Mistake",
    "NameMap",
    "NamedTensors",
    "OffloadWindow",
    "PageConfig",
    "Pending",
    "PhaseCommands",
    "PhaseFailed",
    "PhaseReport",
    "PhaseTimeout",
    "PlacementError",
    "Prompt",
    "PromptData",
    "Push",
    "PushStage",
    "Pusher",
    "RankFailure",
    "ReplyStream",
    "RolloutConfig",
    "RolloutDriver",
    "RolloutError",
    "RolloutOptions",
    "RouterConfig",
    "RunHandle",
    "Sample",
    "SampleFailure",
    "SampleGroup",
    "SampleOptions",
    "SampleStatus",
    "SamplingParams",
    "ServerConfig",
    "ServerEngines",
    "ServerHandle",
    "ServerStatus",
    "Session",
    "StepReport",
    "StoreConfig",
    "StoreStatus",
    "TimelineConfig",
    "TrainerSlot",
    "UnchangedWeights",
    "VerifyConfig",
    "VersionOptions",
    "VersionSpan",
    "VersionUnavailable",
    "WeightChecks",
    "WeightError",
    "WeightMismatch",
    "WeightsConfig",
    "WeightsUnavailable",
    "canary_logprobs",
    "compare_logprobs",
    "connect",
    "correction_metrics",
    "fp8_block_quantiser",
    "importance_weights",
    "launch",
    "merged",
    "rejection_mask",
    "token_logprobs",
]
