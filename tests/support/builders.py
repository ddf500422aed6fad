"""Groups, servers and pushes over fake engines, ready to be driven."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engines import fake
from engines.fake import FakeEngine, FakeLauncher, FakeTensor, pack_tensors
from engines.fake.engine.fake_weights import DEFAULT_TENSORS, SAVED
from engines.protocol import Endpoint, TensorInfo
from rollout.config import LifecycleConfig, ServerConfig, Transport, VerifyConfig, WeightUpdate
from rollout.control.group.server_group import GroupSettings, ServerGroup
from rollout.control.server.agents_client import AgentsClient
from rollout.control.server.journal import ServerJournal
from rollout.control.server.server import RolloutServer
from rollout.core.errors import PhaseTimeout
from rollout.core.types import EngineSlot
from rollout.rules.routing import Backend, BackendState
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.adapter import AsAdapter
from tests.support.vllm_stub.wire import StubLauncher

LAUNCHERS: Mapping[str, Callable[[], FakeLauncher]] = {
    "sglang": FakeLauncher,
    "vllm": StubLauncher,
}
protocol = "sglang"
"""Whose calls the engines of a test take that brings no launcher of its own."""
TENSOR_NAMES = tuple(tensor.name for tensor in DEFAULT_TENSORS)


def slots(group: str, num: int, gpus: int = 0) -> list[EngineSlot]:
    """Slots with so many GPUs each."""
    return [
        EngineSlot(
            f"{group}-{index}",
            group,
            index,
            gpu_ids=tuple(range(index * gpus, (index + 1) * gpus)),
        )
        for index in range(num)
    ]


def with_kinds(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The groups, with a kind of engine where a test does not say it."""
    return {
        name: {**group, "engine": {"kind": "embedded", **group.get("engine", {})}}
        for name, group in groups.items()
    }


def server_config(
    groups: Mapping[str, Mapping[str, Any]],
    *,
    update: str = "full",
    lifecycle: Mapping[str, Any] | None = None,
    verify: Mapping[str, Any] | None = None,
    health: Mapping[str, Any] | None = None,
    model_path: str = "/nowhere",
    not_pushed: Sequence[str] = (),
) -> ServerConfig:
    return ServerConfig.model_validate(
        {
            "model_path": model_path,
            "groups": with_kinds(groups),
            "lifecycle": lifecycle or {},
            "verify": verify or {},
            # In the background of most tests, recovery would only blur what they look at.
            "health": {"recover": False} if health is None else health,
            "weights": {"update": update, "not_pushed": list(not_pushed)},
        }
    )


def make_group(
    num_engines: int = 2,
    *,
    name: str = "main",
    update: str = "full",
    lifecycle: Mapping[str, Any] | None = None,
    verify: Mapping[str, Any] | None = None,
    launcher: FakeLauncher | None = None,
    model_path: str = "/nowhere",
    transport: str = "auto",
    health: Mapping[str, Any] | None = None,
    **group: Any,
) -> tuple[ServerGroup, FakeLauncher]:
    """A group that is not started; its engines are ``<name>-0``, ``<name>-1`` ..."""
    launcher = launcher or LAUNCHERS[protocol]()
    config = server_config(
        {name: {"num_engines": num_engines, **group}}, update=update, health=health
    )
    settings = GroupSettings(
        name=name,
        path=f"servers.policy.groups.{name}",
        model_path=model_path,
        log_dir="/nowhere",
        group=config.groups[name],
        update=WeightUpdate(update),
        lifecycle=LifecycleConfig.model_validate(lifecycle or {}),
        verify=VerifyConfig.model_validate(verify or {}),
        transport=Transport(transport),
    )
    gpus = settings.group.engine.gpus
    made = ServerGroup(settings, slots(name, num_engines, gpus), launcher, launcher.connect)
    return made, launcher


async def started_group(*args: Any, **kwargs: Any) -> tuple[ServerGroup, list[FakeEngine]]:
    """A group that serves, and its engines."""
    group, launcher = make_group(*args, **kwargs)
    await group.start()
    return group, [process.engine for process in launcher.processes.values()]


async def restart(group: ServerGroup, engine_id: str) -> None:
    """As recovery does it, with nothing between the boot and the admission."""
    assert await group.boot(engine_id)
    assert await group.admit(engine_id)


def manifest(tensors: Sequence[TensorInfo] = DEFAULT_TENSORS) -> Manifest:
    return Manifest.of(TensorSpec(one.name, one.dtype, one.shape) for one in tensors)


def adapter_push(
    version: int, name: str = "policy", content: bytes = b"adapter", **more: Any
) -> WeightPush:
    tensors = Manifest.of([TensorSpec(f"lora:{name}:a", "float32", (2, 2))])
    route = AsAdapter(name, {"r": 2, "lora_alpha": 4})
    return WeightPush(version, tensors, [content], route, contents=WeightUpdate.LORA, **more)


def push(
    version: int,
    names: Sequence[str] = TENSOR_NAMES,
    *,
    num_buckets: int = 1,
    known: Sequence[TensorInfo] = DEFAULT_TENSORS,
) -> WeightPush:
    """New contents for ``names`` of ``known``, all distinct from those of other versions."""
    tensors = [one for one in known if one.name in names]
    buckets = [
        pack_tensors(
            {one.name: FakeTensor(one.shape, version) for one in tensors[part::num_buckets]}
        )
        for part in range(num_buckets)
    ]
    return WeightPush(version, manifest(tensors), buckets)


def save(engine: FakeEngine, folder: Path) -> None:
    """Make a folder from which fakes load what this one has, as from a trainer's checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / SAVED).write_text(json.dumps(engine.weights.digests))


def write_checkpoint(folder: Path, tensors: Sequence[TensorInfo] = DEFAULT_TENSORS) -> str:
    """A checkpoint that names ``tensors``; its path."""
    return str(fake.write_checkpoint(folder, tensors))


@dataclass
class RecordingRouter:
    """A ``RouterHost`` that only remembers; ``gates`` starts with how a router starts: closed."""

    gates: list[dict[str, Any]] = field(default_factory=lambda: [{"state": "closed"}])
    members: list[Backend] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    num_stops: int = 0
    drains: list[str] = field(default_factory=list)
    late: str = ""
    start_error: Exception | None = None
    failed: list[tuple[str, str]] = field(default_factory=list)
    has_failed: asyncio.Event = field(default_factory=asyncio.Event)
    pins: dict[str, asyncio.Event] = field(default_factory=dict)

    def pin(self, name: str) -> None:
        """A request stays with this version of an adapter until its event is set."""
        self.pins[name] = asyncio.Event()

    async def pinned(self) -> dict[str, int]:
        return {name: 1 for name, ended in self.pins.items() if not ended.is_set()}

    async def unpinned(self, name: str, timeout_s: float) -> bool:
        ended = self.pins.get(name)
        with suppress(TimeoutError):
            if ended is not None:
                await asyncio.wait_for(ended.wait(), timeout_s)
        return ended is None or ended.is_set()

    async def start(self) -> Endpoint:
        if self.start_error is not None:
            raise self.start_error
        return Endpoint("127.0.0.1", 30000)

    async def stop(self, budget_s: float) -> None:
        self.num_stops += 1

    async def set_gate(self, state: str, **why: Any) -> None:
        self.metrics = why.pop("metrics", self.metrics)
        self.gates.append({"state": state, **why})

    async def set_members(self, epoch: int, members: list[Backend]) -> None:
        self.epochs.append(epoch)
        self.members = members

    async def drained(self, timeout_s: float, engine_id: str = "") -> None:
        self.drains.append(engine_id)
        if self.late:
            raise PhaseTimeout(f"router not drained within {timeout_s:g} s: {self.late}")

    async def stats(self) -> dict[str, Any]:
        return {"epoch": self.epochs[-1] if self.epochs else 0, "server_metrics": self.metrics}

    async def failures(self, timeout_s: float) -> list[tuple[str, str]]:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.has_failed.wait(), timeout_s)
        self.has_failed.clear()
        failed, self.failed = self.failed, []
        return failed

    def fail(self, engine_id: str) -> None:
        """A request was lost: the router takes the engine out by itself."""
        self.members = [
            replace(one, state=BackendState.DEAD) if one.engine_id == engine_id else one
            for one in self.members
        ]
        self.failed.append((engine_id, "connection reset"))
        self.has_failed.set()

    @property
    def gate(self) -> str:
        return self.gates[-1]["state"]

    @property
    def states(self) -> dict[str, str]:
        return {member.engine_id: member.state.value for member in self.members}


@dataclass
class ServerBench:
    """A server, its router and its engines."""

    server: RolloutServer
    router: RecordingRouter
    launcher: FakeLauncher
    groups: dict[str, ServerGroup]

    @property
    def engines(self) -> list[FakeEngine]:
        return [process.engine for process in self.launcher.processes.values()]

    def __getitem__(self, engine_id: str) -> FakeEngine:
        return self.launcher[engine_id]


# One group that shares its GPUs with the trainer, one that keeps its own.
TWO_GROUPS: dict[str, dict[str, Any]] = {
    "shared": {"num_engines": 2},
    "apart": {"num_engines": 1, "needs_offload": False},
}


def make_server(
    folder: Path,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    update: str = "full",
    lifecycle: Mapping[str, Any] | None = None,
    verify: Mapping[str, Any] | None = None,
    health: Mapping[str, Any] | None = None,
    launcher: FakeLauncher | None = None,
    not_pushed: Sequence[str] = (),
    router: RecordingRouter | None = None,
    journal: ServerJournal | None = None,
    agents: AgentsClient | None = None,
) -> ServerBench:
    """A server that is not started, over a checkpoint with the fake's tensors."""
    config = server_config(
        groups or TWO_GROUPS,
        update=update,
        lifecycle=lifecycle,
        verify=verify,
        health=health,
        model_path=write_checkpoint(folder),
        not_pushed=not_pushed,
    )
    launcher = launcher or LAUNCHERS[protocol]()
    made = {
        name: ServerGroup(
            GroupSettings(
                name=name,
                path=f"servers.policy.groups.{name}",
                model_path=config.model_path,
                log_dir=str(folder),
                group=group,
                update=config.weights.update,
                lifecycle=config.lifecycle,
                verify=config.verify,
                health=config.health,
                not_pushed=config.weights.not_pushed,
            ),
            slots(name, group.num_engines, group.engine.gpus),
            launcher,
            launcher.connect,
        )
        for name, group in config.groups.items()
    }
    router = router or RecordingRouter()
    server = RolloutServer("policy", config, made, router, journal=journal, agents=agents)
    return ServerBench(server, router, launcher, made)


async def started_server(folder: Path, *args: Any, **kwargs: Any) -> ServerBench:
    bench = make_server(folder, *args, **kwargs)
    await bench.server.start()
    return bench
