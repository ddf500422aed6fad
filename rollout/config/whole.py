"""The whole of it: servers, the cluster they run on, and how both come out of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from rollout.config.groups import GroupConfig
from rollout.config.lifecycle import HealthConfig, LifecycleConfig
from rollout.config.page import PageConfig, TimelineConfig
from rollout.config.refusal import as_config_error
from rollout.config.router import RouterConfig
from rollout.config.slices import Name, Seconds, Slice
from rollout.config.weights import WeightsConfig
from rollout.errors import ConfigError


class ServerConfig(Slice):
    """One model: its groups of engines behind one router."""

    model_path: str
    """Directory of the Hugging Face checkpoint the engines start from."""
    groups: Annotated[dict[Name, GroupConfig], Field(min_length=1)]
    """The groups, by name."""
    router: RouterConfig = RouterConfig()
    lifecycle: LifecycleConfig = LifecycleConfig()
    health: HealthConfig = HealthConfig()
    weights: WeightsConfig = WeightsConfig()
    timeline: TimelineConfig = TimelineConfig()
    page: PageConfig = PageConfig()


class ClusterConfig(Slice):
    """Where the actors run."""

    address: str | None = None
    """Ray address; left out: the cluster of the running job, else a new local one."""
    namespace: str = "rollout"
    """Ray namespace the actors are named in."""
    trainer_gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs the trainer uses; offloading groups are placed on the same ones."""
    placement_timeout_s: Seconds = 60.0
    """Until the placement group must be granted; past it, what is missing is said."""


class RolloutConfig(Slice):
    """Everything: one or several servers and the cluster they run on."""

    run_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")] = "run"
    """Name of the run; part of actor names and of the log folder."""
    log_dir: str = "runs"
    """Folder for the logs of engines; ``<log_dir>/<run_id>`` is made."""
    servers: Annotated[dict[Name, ServerConfig], Field(min_length=1)]
    """The servers by name: policy, reference, reward, judge ..."""
    cluster: ClusterConfig = ClusterConfig()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RolloutConfig:
        """A config from nested mappings.

        Raises:
            ConfigError: the first wrong setting, with its path and what would be accepted.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"a config is a mapping with the key 'servers', not {type(values).__name__}"
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise as_config_error(error, cls) from None

    @classmethod
    def from_file(cls, path: str | Path) -> RolloutConfig:
        """A config from a YAML or JSON file.

        Raises:
            ConfigError: the file is missing, cannot be parsed, or holds a wrong setting.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
        try:
            values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        except (yaml.YAMLError, json.JSONDecodeError) as error:
            raise ConfigError(f"cannot parse config {path}: {error}") from None
        return cls.from_dict(values)


def check_paths(config: RolloutConfig) -> None:
    """Refuse model directories that are not there, before anything is started.

    Raises:
        ConfigError: naming the server, the path and what has to be in it.
    """
    for name, server in config.servers.items():
        setting = f"servers.{name}.model_path"
        path = Path(server.model_path)
        if not path.is_dir():
            raise ConfigError(
                f"{setting}: there is no directory {server.model_path!r}; "
                "give the folder of a Hugging Face checkpoint",
                setting=setting,
                value=server.model_path,
            )
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{setting}: {server.model_path!r} has no config.json, so it is not a "
                "Hugging Face checkpoint",
                setting=setting,
                value=server.model_path,
            )
