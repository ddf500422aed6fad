"""Settings: YAML, JSON or Python in, one frozen value per part out.

``RolloutConfig`` is the whole; each object is given only its own slice of it.  Unknown keys are
refused with the nearest known one, and every message names the setting by its dotted path.
Options meant for the engine itself travel through ``EngineConfig.options`` untouched.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from engines.protocol import Endpoint, WorkerType
from rollout.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Seconds = Annotated[float, Field(gt=0)]


class EngineKind(StrEnum):
    """Which inference server an engine is."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"
    FAKE = "fake"
    ATTACHED = "attached"


class WeightUpdate(StrEnum):
    """What the trainer sends each step."""

    FULL = "full"
    PARTIAL = "partial"
    LORA = "lora"
    FROZEN = "frozen"


class Drain(StrEnum):
    """What becomes of the requests in flight when their engines are paused."""

    ABORT = "abort"
    RETRACT = "retract"
    FINISH = "finish"


class _Slice(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EngineConfig(_Slice):
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


class GroupConfig(_Slice):
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


class RouterConfig(_Slice):
    """The one door to a server's engines."""

    host: str = "127.0.0.1"
    """Address it binds; loopback unless told, since anyone who reaches it can generate."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port it binds; 0 takes a free one, which ``status`` shows."""
    max_held_requests: Annotated[int, Field(ge=0)] = 4096
    """Requests parked while the engines are offloaded; one more gets a 503."""
    hold_timeout_s: Seconds = 600.0
    """How long a request may stay parked before it gets a 503."""
    connect_timeout_s: Seconds = 5.0
    """Until a connection to an engine must stand; past it, another engine is tried."""
    control_timeout_s: Seconds = 15.0
    """How late the router itself may be with its answer to the server it belongs to."""
    max_connections: Annotated[int, Field(ge=1)] = 16384
    """Connections to engines at the same time; each needs a file descriptor."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 256 << 20
    """The longest request body it takes; a longer one gets a 413."""
    request_timeout_s: Seconds = 7200.0
    """From a request's head to its last byte, waiting included; past it, 504 or a cut reply."""
    policy: Literal["least_in_flight", "power_of_two", "round_robin", "session", "prefix"] = (
        "least_in_flight"
    )
    """How an engine is chosen; ``session`` goes by ``X-Session-ID`` or ``session_id``, ``prefix``
    by the beginning of the prompt, both within bounds of load."""
    session_ttl_s: Seconds = 3600.0
    """A session (its engine, its recorded turns) unheard of for so long is forgotten."""
    max_sessions: Annotated[int, Field(ge=1)] = 100_000
    """Sessions remembered; beyond it the oldest is forgotten, and recording another is refused."""
    token_failover: Literal["off", "asked", "on"] = "asked"
    """Whether a request goes on elsewhere, token by token, when its engine dies: never, when its
    header ``X-Token-Failover: on`` asks for it, or always."""
    failover_interval: Annotated[int, Field(ge=1)] = 32
    """Tokens between two looks at a request that can fail over; what came since is recomputed.
    More for a long one that is not streamed: none is looked at more than 64 times."""
    max_failovers: Annotated[int, Field(ge=1)] = 8
    """How many engines one request may lose before it fails."""
    client_key: str = Field(default="", repr=False)
    """Bearer key that clients must show; left out: none needed."""
    control_key: str = Field(default="", repr=False)
    """Bearer key for ``/engines``, ``/metrics``, ``/sessions``, aborts; left out: the client's."""
    max_recorded_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Recorded turns of all sessions together; past it, recording another turn is refused."""


class LifecycleConfig(_Slice):
    """Deadlines of the phases, and what happens to an engine that misses one."""

    on_failure: Literal["fence", "raise"] = "fence"
    """``fence`` goes on without the failed engine; ``raise`` stops the step."""
    drain: Drain = Drain.ABORT
    """Requests in flight at a pause: ``abort`` ends them with the tokens they have; ``retract``
    lets them go on afterwards, under the new weights; ``finish`` waits for them first."""
    drain_timeout_s: Seconds = 60.0
    """What ``finish`` gives them, and what those of an engine that is removed get; then they
    are aborted."""
    pause_timeout_s: Seconds = 60.0
    """Until every engine has stopped generating."""
    flush_timeout_s: Seconds = 60.0
    """Until nothing is in flight and the caches are empty; waits inside the engine."""
    release_timeout_s: Seconds = 120.0
    """Until the memory is given back, backup to the host included."""
    resume_timeout_s: Seconds = 120.0
    """Until the memory is there again."""
    update_timeout_s: Seconds = 600.0
    """Until one engine holds all of a push."""
    verify_timeout_s: Seconds = 60.0
    """Until every engine has shown its weight version and fingerprints."""
    verify_by: Literal["fingerprint", "canary", "version"] = "fingerprint"
    """``fingerprint`` reads all weights once per step, and has those that it cannot compare tell a
    canary; ``canary`` compares log-probabilities of fixed prompts in its place; ``version`` only
    asks for the number."""
    canary_prompts: tuple[Annotated[tuple[int, ...], Field(min_length=2)], ...] = ()
    """Token ids of those prompts; left out: two, drawn from the middle of the vocabulary."""
    canary_tolerance: Annotated[float, Field(gt=0)] = 0.1
    """Nats by which they may differ on average, and ten times that at one token; equal weights
    do on other kernels and layouts, lost ones by whole nats."""
    continue_timeout_s: Seconds = 60.0
    """Until every engine generates again."""
    stop_timeout_s: Seconds = 15.0
    """What engines and router get to end by themselves before they are killed."""
    lock_timeout_s: Seconds = 900.0
    """How long a command waits for the one before it; then it is refused with its owner."""


class HealthConfig(_Slice):
    """How engines are watched, and how a dead one comes back.

    An engine that falls silent, with its node or alone, is out of its group after at most
    ``probes_to_dead * (probe_interval_s + probe_timeout_s)`` seconds, 40 as these are; after
    ``patience`` times as many where its group has too few without it.
    """

    recover: bool = True
    """Watch the engines and replace dead ones; without it an engine that fails stays fenced."""
    probe_interval_s: Seconds = 5.0
    """From one look at all engines to the next; a failure the router sees is looked at at once."""
    probe_timeout_s: Seconds = 5.0
    """How late the answer to a probe may be; probes have connections of their own."""
    probes_to_suspect: Annotated[int, Field(ge=1)] = 2
    """Failed probes in a row after which new requests go to others, if others are well."""
    probes_to_dead: Annotated[int, Field(ge=1)] = 4
    """Failed probes in a row after which an engine is killed and replaced."""
    patience: Annotated[int, Field(ge=1)] = 3
    """Times as many failed probes for an engine without which its group has too few left."""
    reports_to_dead: Annotated[int, Field(ge=1)] = 3
    """Times the router may lose an engine that answers probes, before it is replaced."""
    probes_to_trust: Annotated[int, Field(ge=1)] = 12
    """Answered probes in a row after which what the router reported before is forgotten."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts of one engine before it stays fenced for good."""
    backoff_s: Seconds = 2.0
    """Pause before the second restart of an engine in a row; doubles with each more."""
    max_backoff_s: Seconds = 120.0
    """Longest pause between two restarts of an engine."""
    forget_after_s: Seconds = 600.0
    """An engine that has served this long has all its restarts again."""
    max_parallel_restarts: Annotated[int, Field(ge=1)] = 4
    """Engines of a server started again at the same time; loading many starves the others."""
    weights_path: str | None = None
    """Where saved weights are, as ``/ckpt/{version}``: a restarted engine need not await a push."""

    @model_validator(mode="after")
    def _thresholds_fit(self) -> HealthConfig:
        if self.probes_to_suspect > self.probes_to_dead:
            raise ValueError(f"probes_to_suspect {self.probes_to_suspect} is over probes_to_dead")
        if self.weights_path is not None and "{version}" not in self.weights_path:
            raise ValueError("weights_path has no {version} in it, so it would always be the same")
        return self


class StoreConfig(_Slice):
    """The current policy in spare memory, for engines that come back without the trainer.

    Each node takes twice its share of ``replicas`` copies of the model (two versions), at most
    twice the model, and what it lacks of the model while an engine is restored there; ``rollout
    plan`` says how much that is. Leave it off where that memory is needed by engines or trainer,
    where a saved checkpoint of every version is at hand anyway, or where engines may wait for the
    next push.
    """

    replicas: Annotated[int, Field(ge=1)] = 2
    """Different nodes that keep each byte; nodes that may be lost are one less."""
    path: str = "/dev/shm"
    """Folder in memory, the same on every node. In a tmpfs mounted with ``huge=within_size``
    the first write costs a quarter, and restores go up to twice as fast."""
    unit_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    """About how much is placed, sent and proved together: an expert, or a piece of a layer."""
    segment_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """About how long one file is."""
    spare_bytes: Annotated[int, Field(ge=0)] = 2 << 30
    """Memory of each node that it leaves free; with less than this, pushes are not kept."""
    lease_s: Seconds = 600.0
    """A run of which nothing is heard for so long loses its bytes."""
    write_timeout_s: Seconds = 600.0
    """Until a push is kept, in the background; past it, that push is not."""
    max_failures: Annotated[int, Field(ge=1)] = 3
    """Failures in a row after which it switches itself off."""


class Transport(StrEnum):
    """How a push reaches the engines."""

    AUTO = "auto"
    TENSOR = "tensor"
    SHARED_MEMORY = "shared_memory"
    DISTRIBUTED = "distributed"
    DISK = "disk"
    CUDA_IPC = "cuda_ipc"


class WeightsConfig(_Slice):
    """How new weights reach the engines."""

    update: WeightUpdate = WeightUpdate.FULL
    """What a push contains; decides what a release may forget."""
    bucket_bytes: Annotated[int, Field(ge=1)] = 256 * 1024 * 1024
    """Bytes of tensors sent in one call."""
    transport: Transport = Transport.AUTO
    """``auto``: ``shared_memory`` where all engines run on the trainer's host and it has room, else
    ``tensor``. ``distributed`` broadcasts (gloo, NCCL); ``disk`` keeps each version."""
    stream: bool = False
    """Make a bucket while engines take the one before: faster, and no copy of the model is ever
    whole, but the tensors must not change until the push has ended."""
    fingerprint: bool = True
    """Fingerprint what is pushed, and compare it with what engines hold that can tell."""
    shared_memory_path: str = "/dev/shm"
    """Folder in tmpfs for ``shared_memory``; what is taken there is kept for the next push. In a
    tmpfs mounted with ``huge=within_size`` taking it costs a quarter."""
    disk_path: str | None = None
    """Folder for ``disk``, as ``/ckpt/{version}``; give ``health.weights_path`` the same."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Of ``distributed``; ``auto``: NCCL for tensors on a GPU."""
    group_timeout_s: Seconds = 60.0
    """Until all engines have joined a broadcast, and for each bucket of it; then all are freed."""
    adapter: str = "policy"
    """Name under which adapters are pushed with ``update: lora``; requests give it as
    ``lora_path``."""
    store: StoreConfig | None = None
    """Keep the published weights in the nodes' memory: ``true``, or settings of its own."""

    @field_validator("store", mode="before")
    @classmethod
    def _store_is_a_switch_too(cls, value: Any) -> Any:
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _store_gets_whole_pushes(self) -> WeightsConfig:
        if self.store is None:
            return self
        if self.update not in (WeightUpdate.FULL, WeightUpdate.LORA):
            raise ValueError(
                f"the store keeps full pushes, and weights.update is {self.update}; leave out "
                "weights.store"
            )
        if self._streams():
            raise ValueError(
                "the store keeps what a push leaves behind, and with stream, distributed or "
                "cuda_ipc it leaves nothing; use shared_memory, tensor or disk without stream"
            )
        if not self.fingerprint:
            raise ValueError(
                "the store proves what it reads by the push's fingerprints; set fingerprint to true"
            )
        return self

    def _streams(self) -> bool:
        return self.stream or self.transport in (Transport.DISTRIBUTED, Transport.CUDA_IPC)

    @model_validator(mode="after")
    def _disk_has_a_place(self) -> WeightsConfig:
        if self.transport is Transport.DISK and self.disk_path is None:
            raise ValueError("transport disk needs disk_path, as /ckpt/{version}")
        if self.disk_path is not None and "{version}" not in self.disk_path:
            raise ValueError("disk_path has no {version} in it, so it would always be the same")
        return self


class TimelineConfig(_Slice):
    """What is recorded of phases, engines and calls, besides the files of the run."""

    otel: bool = False
    """Also send spans through OpenTelemetry, as the ``OTEL_*`` variables of the process say."""


class PageConfig(_Slice):
    """The live page of a server: what people and Prometheus look at."""

    enabled: bool = True
    """Whether there is one; without it, ``doctor`` and ``top`` work over Ray only."""
    host: str = "127.0.0.1"
    """Address it binds; another one than loopback needs a key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port it binds; 0 takes a free one, which ``status`` shows."""
    key: str = Field(default="", repr=False)
    """Key for looking, as a bearer token or typed into the page."""
    control_key: str = Field(default="", repr=False)
    """Bearer key for fencing and stopping from the page; left out: it is read-only."""

    @model_validator(mode="after")
    def _others_need_a_key(self) -> PageConfig:
        if self.enabled and not self.key and not is_loopback(self.host):
            raise ValueError(f"host {self.host} is reached from elsewhere: set page.key")
        return self


class ServerConfig(_Slice):
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


class ClusterConfig(_Slice):
    """Where the actors run."""

    address: str | None = None
    """Ray address; left out: the cluster of the running job, else a new local one."""
    namespace: str = "rollout"
    """Ray namespace the actors are named in."""
    trainer_gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs the trainer uses; offloading groups are placed on the same ones."""
    placement_timeout_s: Seconds = 60.0
    """Until the placement group must be granted; past it, what is missing is said."""


class RolloutConfig(_Slice):
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
            raise _as_config_error(error) from None

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


def _as_config_error(error: ValidationError) -> ConfigError:
    # A mistyped key also shows as a missing one: the typo is the thing to say.
    first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    location = first["loc"]
    setting = ".".join(str(part) for part in location if part != "[key]")
    value = first.get("input")
    if first["type"] == "extra_forbidden":
        message = _unknown_key(location)
    elif first["type"] == "missing":
        message = f"{setting} is missing"
    else:
        shown = "(hidden)" if _is_secret(setting, value) else repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        message = f"{setting or 'config'} = {shown}: {first['msg']}"
    more = error.error_count() - 1
    if more:
        message += f" ({more} more wrong)"
    return ConfigError(message, setting=setting, value=value)


def _is_secret(setting: str, value: Any) -> bool:
    """Whether a value may hold a key: one itself, or a slice with keys in it."""
    last = setting.rpartition(".")[2]
    holds = isinstance(value, Mapping) and any(str(name).endswith("_key") for name in value)
    return last == "key" or last.endswith("_key") or last == "env" or holds or last == "page"


def _unknown_key(location: tuple[int | str, ...]) -> str:
    *parents, key = (str(part) for part in location)
    known = list(_slice_at(parents).model_fields)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    where = ".".join(parents) or "the config"
    return f"unknown key {key!r} in {where}; {hint}"


def _slice_at(path: list[str]) -> type[BaseModel]:
    model: type[BaseModel] = RolloutConfig
    for part in path:
        field = model.model_fields.get(part)
        if field is None:  # a name chosen by the user: the key of a dict of slices
            continue
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                model = candidate
    return model
