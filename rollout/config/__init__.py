"""The configuration: read from YAML, JSON or Python into frozen values.

``RolloutConfig`` is the root; every object of the library gets only its own section.  An unknown
key is an error that suggests the closest valid key.  Every error names the setting by its dotted
path.  ``EngineConfig.options`` is passed to the engine unchanged.
"""

from __future__ import annotations

from engines.protocol import WorkerType
from rollout.config.agents import AgentsConfig
from rollout.config.groups import EngineConfig, EngineKind, GroupConfig
from rollout.config.http import PageConfig, RouterConfig
from rollout.config.lifecycle import Drain, HealthConfig, LifecycleConfig
from rollout.config.root import (
    ClusterConfig,
    RolloutConfig,
    ServerConfig,
    TimelineConfig,
)
from rollout.config.weights import (
    Casts,
    EncodingChoice,
    StoreConfig,
    Transport,
    VerifyConfig,
    WeightsConfig,
    WeightUpdate,
)

__all__ = [
    "AgentsConfig",
    "Casts",
    "ClusterConfig",
    "Drain",
    "EncodingChoice",
    "EngineConfig",
    "EngineKind",
    "GroupConfig",
    "HealthConfig",
    "LifecycleConfig",
    "PageConfig",
    "RolloutConfig",
    "RouterConfig",
    "ServerConfig",
    "StoreConfig",
    "TimelineConfig",
    "Transport",
    "VerifyConfig",
    "WeightUpdate",
    "WeightsConfig",
    "WorkerType",
]
