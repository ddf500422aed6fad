"""Reading the configuration file that a command is given, and starting what it describes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import rollout
from rollout.config import RolloutConfig, check_paths
from rollout.core.errors import ConfigError
from rollout.runtime.handle import DeploymentHandle


def load_config(path: Path) -> RolloutConfig:
    """Read a configuration and check that its model directories exist.

    Raises:
        ConfigError: a setting is wrong, or a directory does not exist.
    """
    loaded = RolloutConfig.from_file(path)
    check_paths(loaded)
    return loaded


def launch(config: RolloutConfig, backend: str) -> DeploymentHandle:
    """Start everything that ``config`` describes and wait until it serves; the caller stops it.

    Raises:
        ConfigError: there is no such backend.
    """
    chosen: Literal["local", "ray"] = "ray" if backend == "ray" else "local"
    if backend != chosen:
        raise ConfigError(f"--backend {backend!r}: must be 'local' or 'ray'")
    return rollout.launch(config, backend=chosen)
