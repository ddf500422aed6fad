"""Engines, and the groups that they make."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, model_validator

from engines.protocol import Endpoint, WorkerType
from rollout.config.slices import Seconds, Slice


class EngineKind(StrEnum):
    """Which inference server an engine is."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"
    FAKE = "fake"
    ATTACHED = "attached"


class EngineConfig(Slice):
    """How one engine of a group is started."""

    kind: EngineKind = EngineKind.EMBEDDED
    """``embedded`` runs on transformers in a process of ours; ``sglang`` launches SGLang;
    ``attached`` uses engines that run already, and never ends them; ``fake`` answers without a
    model, for tests of what is built on this."""
    urls: tuple[str, ...] = ()
    """Where attached engines listen, ``http://host:port`` each; they are the group's engines."""
    python: str = ""
    """Interpreter that has the engine, left out: this one; ``sglang-cpu``: the cached CPU one."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs one engine spans (tensor times pipeline parallel); 0 runs it on the CPU."""
    nodes: Annotated[int, Field(ge=1)] = 1
    """Nodes one engine spans, each with an equal part of its GPUs; more than one needs Ray."""
    cpus: Annotated[float, Field(gt=0)] = 1.0
    """CPU cores reserved for one engine on each of its nodes; also its number of torch threads."""
    weights_cpu_backup: bool | None = None
    """Keep a host copy of the weights while released; left out, the release policy decides."""
    start_timeout_s: Seconds = 300.0
    """Until the engine must answer as ready; past it, it is killed and its log shown."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Options of the engine itself, in its own names, such as ``max-total-tokens: 20000``."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables added to the engine's own."""

    @model_validator(mode="after")
    def _attached_is_told_where_and_nothing_else(self) -> EngineConfig:
        if self.kind is not EngineKind.ATTACHED:
            if self.urls:
                raise ValueError("urls are for engines of kind attached")
            self._nodes_fit()
            return self
        if not self.urls:
            raise ValueError("an attached engine needs urls, a list of http://host:port")
        for url in self.urls:
            Endpoint.of_url(url)
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls name an engine twice")
        launching = [name for name in ("gpus", "python", "options", "env") if getattr(self, name)]
        launching += ["nodes"] if self.nodes > 1 else []
        if launching:
            raise ValueError(
                f"{', '.join(launching)} cannot be set: an attached engine is launched by others"
            )
        return self

    def _nodes_fit(self) -> None:
        if self.nodes > 1 and self.kind is EngineKind.EMBEDDED:
            raise ValueError(f"nodes {self.nodes}: an embedded engine is on one node; SGLang can")
        if self.gpus % self.nodes:
            raise ValueError(f"gpus {self.gpus} cannot be divided equally over {self.nodes} nodes")


class GroupConfig(Slice):
    """Engines alike in every setting, which go through the lifecycle together."""

    num_engines: Annotated[int, Field(ge=1)] = 1
    """How many engines the group starts."""
    worker_type: WorkerType = WorkerType.REGULAR
    """What its engines are for; ``placeholder`` reserves its place and starts nothing."""
    needs_offload: bool = True
    """Whether it shares its GPUs with the trainer and gives their memory back each step."""
    min_engines: Annotated[int, Field(ge=0)] | None = None
    """Fewest engines it may go on with when one fails; left out: 1, or all with ``raise``."""
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="before")
    @classmethod
    def _attached_engines_are_counted(cls, values: Any) -> Any:
        engine = values.get("engine") if isinstance(values, Mapping) else None
        urls = engine.get("urls") if isinstance(engine, Mapping) else getattr(engine, "urls", ())
        if urls and isinstance(urls, (list, tuple)):
            return {"num_engines": len(urls), **values}
        return values

    @model_validator(mode="after")
    def _urls_are_as_many_as_engines(self) -> GroupConfig:
        urls = self.engine.urls
        if urls and len(urls) != self.num_engines:
            raise ValueError(f"num_engines {self.num_engines}, but {len(urls)} urls; leave it out")
        return self

    @model_validator(mode="after")
    def _min_engines_fit(self) -> GroupConfig:
        if self.min_engines is not None and self.min_engines > self.num_engines:
            raise ValueError(f"min_engines {self.min_engines} is over num_engines")
        return self
