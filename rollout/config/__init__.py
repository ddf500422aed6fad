"""Settings: YAML, JSON or Python in, one frozen value per part out.

``RolloutConfig`` is the whole; each object is given only its own slice of it.  Unknown keys are
refused with the nearest known one, and every message names the setting by its dotted path.
Options meant for the engine itself travel through ``EngineConfig.options`` untouched.
"""

from __future__ import annotations

from rollout.config.groups import EngineConfig, EngineKind, GroupConfig
from rollout.config.lifecycle import Drain, HealthConfig, LifecycleConfig
from rollout.config.page import PageConfig, TimelineConfig
from rollout.config.router import RouterConfig
from rollout.config.slices import is_loopback
from rollout.config.weights import StoreConfig, Transport, WeightsConfig, WeightUpdate
from rollout.config.whole import ClusterConfig, RolloutConfig, ServerConfig, check_paths

__all__ = [
    "ClusterConfig",
    "Drain",
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
    "WeightUpdate",
    "WeightsConfig",
    "check_paths",
    "is_loopback",
]
