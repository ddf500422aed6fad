"""Settings of engines and of groups of engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, model_validator

from engines.kinds import KINDS, kind_of
from engines.protocol import NO_ACCESS, Endpoint, EngineAccess, WorkerType
from engines.protocol.kind import Kind
from rollout.config.base import ConfigSection, Seconds


class EngineKind(StrEnum):
    """Which inference server an engine runs."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"
    VLLM = "vllm"
    FAKE = "fake"
    ATTACHED = "attached"


def _gpus_of(given: Mapping[str, Any]) -> int:
    """GPUs of an engine that does not say how many, by its settings that were read before."""
    is_known = {"kind", "urls", "options"} <= given.keys()
    if not is_known or given["urls"]:
        return 0
    return kind_of(given["kind"]).num_gpus(given["options"])


class EngineConfig(ConfigSection):
    """How one engine of a group is started."""

    kind: EngineKind
    """``sglang`` launches SGLang, and ``vllm`` launches vLLM. ``embedded`` runs our own decoder in
    a child process. ``attached`` uses engines that already run and never stops them; for running
    vLLM servers, set ``vllm`` and ``urls``. ``fake`` generates without a model, for tests of code
    that uses this library."""
    urls: tuple[str, ...] = ()
    """Addresses of the attached engines, each ``http://host:port``; one engine per address."""
    takeover: bool = False
    """Attach engines also if another run uses them, which fences them then. By default the launch
    is refused, as far as that run is seen: it is of the same user, on this host."""
    key: bool | str = Field(default=True, repr=False)
    """Bearer key of its requests. By default each launch makes random keys, which only router and
    control have; ``false`` makes none. For attached engines the key that they were started with;
    default: none."""
    control_key: str = Field(default="", repr=False)
    """Key of the calls that change attached engines, such as SGLang's ``admin-api-key``. Default:
    ``key``."""
    python: str = ""
    """Python interpreter in which the engine is installed. Default: the interpreter of this
    process."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Options passed to the engine under its own names, for example ``max-total-tokens: 20000``."""
    gpus: Annotated[int, Field(ge=0)] = Field(default_factory=_gpus_of)
    """GPUs of one engine; 0 runs it on the CPU. Default: for ``sglang`` and ``vllm`` the product of
    the parallel sizes in ``options``, 1 without any; else 0."""
    nodes: Annotated[int, Field(ge=1)] = 1
    """Nodes of one engine, each with an equal share of its GPUs; more than one needs Ray."""
    cpus: Annotated[float, Field(gt=0)] = 1.0
    """CPU cores reserved for one engine on each of its nodes; also its number of torch threads."""
    weights_cpu_backup: bool | None = None
    """Keep a copy of the weights in host memory while they are released. Default: if not all of
    them are pushed, by ``weights.update`` or because vLLM has a draft model."""
    start_timeout_s: Seconds | None = None
    """Deadline for the engine to report ready; an engine that misses it is killed and its log is
    shown. An engine whose process ends fails at once. Default: 300 s on CPUs, 900 s on GPUs, and
    5 s for each GB of the checkpoint."""
    kill_timeout_s: Seconds | None = None
    """Deadline for a killed engine to end and for its memory, also that of its GPUs, to be free;
    the kill ends as soon as this was measured. An engine that misses it may still hold memory, so
    an offload fails. Default: 25 s on CPUs, 150 s on GPUs."""
    env: Mapping[str, str] = Field(default_factory=dict, repr=False)
    """Environment variables added to those of the engine process. For attached engines only
    ``SGLANG_VLM_CACHE_SIZE_MB: "0"``: they were started with it, so they keep no embeddings."""

    @property
    def of_kind(self) -> Kind:
        """What is true of all engines of its kind."""
        return kind_of(self.kind)

    @property
    def is_attached(self) -> bool:
        """Its engines already run, and are never stopped from here."""
        return self.of_kind.invocation is None or bool(self.urls)

    @property
    def access(self) -> EngineAccess | None:
        """Its keys, or None if each launch makes its own."""
        if self.is_attached:
            key = self.key if isinstance(self.key, str) else ""
            return EngineAccess(key, self.control_key)
        return None if self.key else NO_ACCESS

    @property
    def may_keep_embeddings(self) -> bool:
        """Its engines already run, and it does not say that they keep none."""
        variable = self.of_kind.old_state.embeddings_variable
        return self.is_attached and bool(variable) and self.env.get(variable) != "0"

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.is_attached and self.of_kind.can_attach:
            yield from self._conflicts_of_attached()
        elif self.urls:
            attachable = " or ".join(kind.name for kind in KINDS.values() if kind.can_attach)
            yield (
                "urls",
                f"urls are for engines of kind {attachable}; leave urls out, or set kind to "
                "attached",
            )
        yield from self._conflicts_of_kind()
        if not self.is_attached:
            given = {"key": isinstance(self.key, str), "control_key": bool(self.control_key)}
            for name in (name for name, is_given in given.items() if is_given):
                yield (
                    name,
                    f"{name} is for attached engines, and each launch makes its own keys; leave it "
                    "out, or set key to false for none",
                )
        if self.takeover and not self.is_attached:
            yield "takeover", "takeover is for attached engines, and this run launches its own"
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name + value:
                yield "env", f"{name!r} cannot be an environment variable"
        if self.gpus % self.nodes:
            yield "gpus", f"gpus {self.gpus} cannot be divided equally over {self.nodes} nodes"

    def _conflicts_of_kind(self) -> Iterator[tuple[str, str]]:
        if self.nodes > 1 and not self.of_kind.spans_nodes:
            yield (
                "nodes",
                f"nodes {self.nodes}: an engine of kind {self.kind} runs on one node; "
                "use kind sglang",
            )

    def _conflicts_of_attached(self) -> Iterator[tuple[str, str]]:
        if not self.urls:
            yield "urls", "an attached engine needs urls, a list of http://host:port"
        for url in self.urls:
            if not _is_address(url):
                yield "urls", f"{url!r} is no address of an engine, which is http://host:port"
        if len(set(self.urls)) < len(self.urls):
            yield "urls", "urls name an engine twice; list each address once"
        launching = [name for name in ("gpus", "python", "options") if getattr(self, name)]
        variable = self.of_kind.old_state.embeddings_variable
        launching += ["env"] if self.env.keys() - {variable} else []
        launching += ["nodes"] if self.nodes > 1 else []
        if launching:
            yield (
                launching[0],
                f"{', '.join(launching)} cannot be set: this run does not launch attached engines",
            )


class GroupConfig(ConfigSection):
    """Engines with the same settings that go through the lifecycle together."""

    num_engines: Annotated[int, Field(ge=1)] = 1
    """Number of engines in the group."""
    worker_type: WorkerType = WorkerType.REGULAR
    """Role of its engines; ``placeholder`` reserves resources and starts nothing."""
    needs_offload: bool = True
    """Whether it shares its GPUs with the trainer and releases their memory each step."""
    min_engines: Annotated[int, Field(ge=0)] | None = None
    """Fewest engines with which the group continues after a failure. Default: 1, or all engines
    with ``lifecycle.on_failure: raise``."""
    standby: Annotated[int, Field(ge=0, le=1)] = 0
    """Engines that sleep beside each engine, booted, with their memory released. When the engine
    dies, the one that sleeps takes its place, and the next one boots behind it."""
    engine: EngineConfig

    @property
    def why_no_nccl(self) -> str:
        """Why it cannot be in one NCCL group with the trainer."""
        if self.worker_type is WorkerType.PLACEHOLDER:
            return ""
        if not self.engine.gpus and not self.engine.is_attached:
            return "its engines run on the CPU"
        if self.needs_offload:
            return "it offloads, so its engines share the trainer's GPUs"
        return ""

    @model_validator(mode="before")
    @classmethod
    def _count_attached_engines(cls, values: Any) -> Any:
        engine = values.get("engine") if isinstance(values, Mapping) else None
        urls = engine.get("urls") if isinstance(engine, Mapping) else getattr(engine, "urls", ())
        if urls and isinstance(urls, (list, tuple)):
            return {"num_engines": len(urls), **values}
        return values

    def conflicts(self) -> Iterator[tuple[str, str]]:
        urls = self.engine.urls
        if urls and len(urls) != self.num_engines:
            yield (
                "num_engines",
                f"num_engines {self.num_engines}, but {len(urls)} urls; leave num_engines out",
            )
        if self.min_engines is not None and self.min_engines > self.num_engines:
            yield (
                "min_engines",
                f"min_engines {self.min_engines} is over num_engines {self.num_engines}",
            )
        if self.standby and (why := self._why_no_standby):
            yield "standby", f"standby {self.standby}: {why}; leave standby out"

    @property
    def _why_no_standby(self) -> str:
        if self.worker_type is WorkerType.PLACEHOLDER or self.engine.is_attached:
            return "this run launches no engine of the group"
        if self.engine.gpus and not self.needs_offload:
            return (
                "with needs_offload false an engine on GPUs keeps its memory, so two of them do "
                "not fit on the same GPUs"
            )
        return ""


def _is_address(url: str) -> bool:
    try:
        Endpoint.of_url(url)
    except ValueError:
        return False
    return True
