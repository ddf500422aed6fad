"""Reading the configuration that a command is given, and starting what it describes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import rollout
from rollout.config import RolloutConfig
from rollout.config.root import check_paths, examined_from
from rollout.config.sources.layers import Sources
from rollout.core.errors import ConfigError
from rollout.runtime.handle import DeploymentHandle


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The paths of files, and the overrides ``key.path=value``.

    A path with a ``=`` has a ``/`` before it, as in ``./a=b.yaml``.
    """
    overrides = [text for text in arguments if "=" in text and "/" not in text.partition("=")[0]]
    return [Path(text) for text in arguments if text not in overrides], overrides


def read_sources(arguments: Sequence[str]) -> Sources:
    """Read the files and overrides among the arguments of a command.

    Raises:
        ConfigError: there is no file, one cannot be read, or an override is wrong.
    """
    paths, overrides = split_arguments(arguments)
    if not paths:
        raise ConfigError("name a file with the configuration before its overrides")
    return Sources.read(paths, overrides)


def load_config(arguments: Sequence[str]) -> RolloutConfig:
    """Read a configuration and check that its model directories exist.

    Raises:
        ConfigError: a setting is wrong, or a directory does not exist.
    """
    config, mistakes = examined_from(read_sources(arguments))
    if config is None or mistakes:
        raise ConfigError.of(mistakes)
    check_paths(config)
    return config


def launch(config: RolloutConfig, backend: str) -> DeploymentHandle:
    """Start everything that ``config`` describes and wait until it serves; the caller stops it.

    Raises:
        ConfigError: there is no such backend.
    """
    chosen: Literal["local", "ray"] = "ray" if backend == "ray" else "local"
    if backend != chosen:
        raise ConfigError(f"--backend {backend!r}: must be 'local' or 'ray'")
    return rollout.launch(config, backend=chosen)
