"""The root of the configuration: servers, cluster, and how they are read from a file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from rollout.config import compatibility
from rollout.config.agents import AgentsConfig
from rollout.config.base import ConfigSection, Name, PathText, Seconds
from rollout.config.groups import GroupConfig
from rollout.config.http import PageConfig, RouterConfig
from rollout.config.lifecycle import HealthConfig, LifecycleConfig
from rollout.config.mistakes import examine
from rollout.config.sources import hub
from rollout.config.sources.environment import default_log_dir
from rollout.config.sources.hub import HubModel
from rollout.config.sources.layers import Sources
from rollout.config.sources.references import resolve
from rollout.config.weights import VerifyConfig, WeightsConfig
from rollout.core.errors import ConfigError, Mistake


class TimelineConfig(ConfigSection):
    """Where spans of phases, engines and calls are sent, besides the files of the run."""

    otel: bool = False
    """Also export spans through OpenTelemetry, configured by the ``OTEL_*`` variables."""


class ServerConfig(ConfigSection):
    """One model: its groups of engines behind one router."""

    model_path: PathText
    """Directory of the Hugging Face checkpoint that the engines load at start. In a file, a
    relative one is relative to the folder of the file. Or an id of the Hub, such as
    ``Qwen/Qwen3-8B`` or ``Qwen/Qwen3-8B@main``: with ``huggingface_hub`` it is downloaded at
    launch."""
    groups: Annotated[dict[Name, GroupConfig], Field(min_length=1)]
    """Groups of engines, by name."""
    router: RouterConfig = RouterConfig()
    agents: AgentsConfig = AgentsConfig()
    lifecycle: LifecycleConfig = LifecycleConfig()
    health: HealthConfig = HealthConfig()
    weights: WeightsConfig = WeightsConfig()
    verify: VerifyConfig = VerifyConfig()
    timeline: TimelineConfig = TimelineConfig()
    page: PageConfig = PageConfig()

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from compatibility.of_server(
            self.weights, self.verify, self.lifecycle, self.health, self.groups
        )

    @property
    def agents_host(self) -> str:
        """The address that its agents bind."""
        return self.agents.host or self.router.host

    @property
    def nccl_cumem(self) -> Mapping[str, str | None]:
        """Group -> ``NCCL_CUMEM_ENABLE`` of its engines, if they set it, or None if only their
        hosts know."""
        found: dict[str, str | None] = {}
        for name, group in self.groups.items():
            engine = group.engine
            if (ask := engine.of_kind.nccl_cumem) is not None:
                known = (
                    None if engine.is_attached else ask(engine.options, engine.env, engine.nodes)
                )
                found[name] = known
        return found

    @property
    def why_no_nccl(self) -> str:
        """Why its engines cannot be in one NCCL group with the trainer."""
        return compatibility.why_no_nccl(self.groups)


class ClusterConfig(ConfigSection):
    """The Ray cluster that the actors run on."""

    address: str | None = None
    """Ray address. Default: the cluster of the running job, else a new local one."""
    namespace: str = "rollout"
    """Ray namespace of the actor names."""
    trainer_gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of the trainer; groups with ``needs_offload`` are placed on the same GPUs. If their
    servers together need more, servers are stacked on the same GPUs."""
    placement_timeout_s: Seconds = 60.0
    """Deadline for Ray to grant the placement group and to report its GPU ids; the error names what
    is missing."""


class RolloutConfig(ConfigSection):
    """A run: one or more servers and the cluster they run on."""

    run_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")] = "run"
    """Name of the run; part of actor names and of the log folder."""
    log_dir: PathText = "runs"
    """Folder for logs and other files of runs; this run uses ``<log_dir>/<run_id>``. The variable
    ``ROLLOUT_LOG_DIR`` changes the default."""
    servers: Annotated[dict[Name, ServerConfig], Field(min_length=1)]
    """The servers by name, for example policy, reference, reward, judge."""
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="before")
    @classmethod
    def _log_dir_of_the_environment(cls, values: Any) -> Any:
        return {"log_dir": default_log_dir(), **values} if isinstance(values, Mapping) else values

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Two that cannot both listen at one address, or both drive one engine."""
        yield from _used_twice(
            self._addresses(), "{} is the address of {} too; choose another port"
        )
        yield from _used_twice(
            self._engine_urls(), "{} is an engine of {} too; list each engine once"
        )

    def _addresses(self) -> Iterator[tuple[str, str]]:
        for name, server in self.servers.items():
            if server.router.port:
                yield f"servers.{name}.router.port", f"{server.router.host}:{server.router.port}"
            for port in filter(None, server.agents.ports):
                yield f"servers.{name}.agents.port", f"{server.agents_host}:{port}"
            if server.page.port:
                yield f"servers.{name}.page.port", f"{server.page.host}:{server.page.port}"

    def _engine_urls(self) -> Iterator[tuple[str, str]]:
        for name, server in self.servers.items():
            for group, settings in server.groups.items():
                for url in settings.engine.urls:
                    yield f"servers.{name}.groups.{group}.engine.urls", url.rstrip("/")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RolloutConfig:
        """A config from nested mappings.

        Args:
            values: as in a file, also with references such as ``${oc.env:NAME}``; see the
                configuration reference. OmegaConf's ``DictConfig`` is taken, too.

        Raises:
            ConfigError: all wrong settings, each with its path and what would be accepted.
        """
        return _complete(*cls.examined(values))

    @classmethod
    def examined(cls, values: Any) -> tuple[RolloutConfig | None, list[Mistake]]:
        """The config without its wrong settings, if it can do without them, and all mistakes.

        Args:
            values: as for ``from_dict``; nothing is raised.
        """
        if isinstance(values, Mapping):
            resolved = resolve(values)
            config, mistakes = examine(cls, resolved.values, resolved.mistakes)
            return config, resolved.mask(mistakes)
        kind = "empty" if values is None else f"a {type(values).__name__}"
        message = f"a config is a mapping with the key 'servers'; this one is {kind}"
        return None, [Mistake("", values, message)]

    @classmethod
    def from_file(cls, *paths: str | Path, overrides: Sequence[str] = ()) -> RolloutConfig:
        """A config from YAML, JSON or TOML files.

        Args:
            paths: of the files, ending in ``.yaml``, ``.yml``, ``.json`` or ``.toml``. A later one
                wins: sections are merged, lists and values are replaced.
            overrides: settings that win over those of all files, each ``key.path=value``; the value
                is YAML.

        Raises:
            ConfigError: a file is missing, cannot be parsed, or holds wrong settings.
        """
        for path in paths:
            if not isinstance(path, (str, Path)):
                raise ConfigError(f"the path of a config is a str or Path, not {path!r}")
        if not paths or isinstance(overrides, str):
            raise ConfigError("from_file takes one path or more, and a list of overrides")
        sources = Sources.read([Path(path) for path in paths], overrides)
        return _complete(*examined_from(sources))

    def with_local_models(self, *, may_download: bool = True) -> RolloutConfig:
        """The same with a folder for each model that is named by its id on the Hub.

        Args:
            may_download: whether a model is downloaded that is not in the cache.

        Raises:
            ConfigError: a model is not in the cache and cannot be downloaded.
        """

        def folder(setting: str, model_path: str) -> str:
            model = HubModel.named(model_path)
            try:
                return model_path if model is None else model.folder(may_download=may_download)
            except ConfigError as error:
                text = f"{setting} = {model_path!r}: {error}"
                raise ConfigError.of([Mistake(setting, model_path, text)]) from error

        return self._with_models(folder)

    def _with_models(self, path_of: Callable[[str, str], str]) -> RolloutConfig:
        """The same with other model paths.

        Args:
            path_of: setting and present path -> path.
        """
        servers = {
            name: server.model_copy(
                update={"model_path": path_of(f"servers.{name}.model_path", server.model_path)}
            )
            for name, server in self.servers.items()
        }
        return self.model_copy(update={"servers": servers})


def _in_folder(folder: Path, model_path: str) -> str:
    """A path relative to a folder, unless it is the id of a model of the Hub."""
    path = folder / model_path
    return str(path) if path.is_dir() or HubModel.named(model_path) is None else model_path


def examined_from(sources: Sources) -> tuple[RolloutConfig | None, list[Mistake]]:
    """``RolloutConfig.examined`` of files and overrides; a mistake names where its value is from.

    A relative ``model_path`` of a file is relative to the folder of the file.

    Args:
        sources: what ``rollout.config.sources`` has read.

    Raises:
        ConfigError: they cannot be merged.
    """
    config, mistakes = RolloutConfig.examined(sources.merged())
    if config is not None:
        config = config._with_models(
            lambda setting, text: _in_folder(sources.folder_of(setting), text)
        )
    return config, sources.located(mistakes)


def _complete(config: RolloutConfig | None, mistakes: Sequence[Mistake]) -> RolloutConfig:
    if config is None or mistakes:
        raise ConfigError.of(mistakes)
    return config


def _used_twice(uses: Iterable[tuple[str, str]], why: str) -> Iterator[tuple[str, str]]:
    owners: dict[str, str] = {}
    for setting, used in uses:
        if used in owners:
            yield setting, why.format(used, owners[used])
        owners.setdefault(used, setting)


def check_paths(config: RolloutConfig) -> None:
    """Check that every model directory exists, before anything is started.

    Raises:
        ConfigError: directories are missing or have no ``config.json``; names the settings.
    """
    if mistakes := list(wrong_paths(config)):
        raise ConfigError.of(mistakes)


def wrong_paths(config: RolloutConfig) -> Iterator[Mistake]:
    """The model directories that are none; a model of the Hub is looked for at launch."""
    for name, server in config.servers.items():
        shown, path = repr(server.model_path), Path(server.model_path)
        if HubModel.named(server.model_path):
            continue
        if not path.is_dir():
            reason = f"there is no directory {shown}; {_way_to(server.model_path)}"
        elif not (path / "config.json").is_file():
            reason = f"{shown} has no config.json, so it is not a Hugging Face checkpoint"
        else:
            continue
        setting = f"servers.{name}.model_path"
        yield Mistake(setting, server.model_path, f"{setting}: {reason}")


def _way_to(model_path: str) -> str:
    """What to write in the place of a path that is no directory."""
    # A path that a file gave is joined to the folder of the file.
    written = re.search(r"(?:^|(?<=/))~/.*|\$\{?\w+.*", model_path)
    if written:
        expanded = os.path.expandvars(os.path.expanduser(written[0]))
        return f"~ and variables are not expanded; write {expanded!r}"
    way = "give the folder of a Hugging Face checkpoint"
    if hub.has_hub():
        return f"{way}, or its id on the Hub, such as Qwen/Qwen3-8B"
    parts = Path(model_path).parts[-2:]
    if len(parts) == 2 and "/" not in parts[0]:
        hub_id = "/".join(parts)
        way += (
            f"; one of the Hub is downloaded with `hf download {hub_id} --local-dir {parts[1]}`, "
            "or at launch where huggingface_hub is installed"
        )
    return way
