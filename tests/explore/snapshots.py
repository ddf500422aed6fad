"""Worlds to start from: built once, then copied by pickle, which is quicker than starting one."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

from engines.fake.engine.engine_state import FakeSettings
from engines.protocol import Endpoint, TensorInfo, WeightsReport
from rollout.config import (
    EngineConfig,
    GroupConfig,
    HealthConfig,
    LifecycleConfig,
    RouterConfig,
    ServerConfig,
    VerifyConfig,
    WeightsConfig,
)
from rollout.control.deployment import Deployment
from rollout.control.group.server_group import GroupSettings, ServerGroup
from rollout.control.recovery.health_tracker import GroupTerms
from rollout.control.server.group_registry import ActorFactory
from rollout.control.server.journal import ServerJournal
from rollout.control.server.server import RolloutServer
from rollout.core.types import EngineSlot, GroupStatus
from rollout.observability.timeline.recorder import Timeline
from rollout.rules.lifecycle import GroupTraits
from rollout.rules.release_policy import ReleasePolicy
from rollout.rules.routing import Backend
from rollout.weights.format.manifest import Manifest
from tests.explore.explorer import ExploredLoop, Violation, following, run
from tests.explore.settings import BUDGET_S, LOCK_S, Settings
from tests.explore.steered import (
    Delayed,
    KeptPushes,
    Launcher,
    Parts,
    Record,
    SteeredRouter,
    Successors,
)
from tests.explore.world import World

# One group that shares its GPUs with the trainer, one that keeps its own.
TWO_BY_TWO: dict[str, dict[str, Any]] = {
    "shared": {"num_engines": 2},
    "apart": {"num_engines": 2, "needs_offload": False},
}
_LIFECYCLE = {f"{what}_timeout_s": BUDGET_S for what in ("command", "memory", "update")}

# Values that never change: a copy of a world has the same ones.
_SHARED: list[Any] = []
_INDEX: dict[int, int] = {}


def _share(value: Any) -> tuple[Callable[[int], Any], tuple[int]]:
    index = _INDEX.get(id(value))
    if index is None:
        index = _INDEX[id(value)] = len(_SHARED)
        _SHARED.append(value)
    return _shared, (index,)


def _shared(index: int) -> Any:
    return _SHARED[index]


_CONSTANT = (
    Endpoint,
    EngineConfig,
    EngineSlot,
    FakeSettings,
    GroupConfig,
    GroupSettings,
    GroupStatus,
    GroupTerms,
    HealthConfig,
    LifecycleConfig,
    VerifyConfig,
    Manifest,
    Backend,
    ReleasePolicy,
    RouterConfig,
    ServerConfig,
    TensorInfo,
    GroupTraits,
    WeightsConfig,
    WeightsReport,
)


class _NoTimeline(Timeline):
    """What happened is no part of a world: nothing of it is kept, nor copied."""

    def span(self, *about: Any, **more: Any) -> Any:
        return _NOWHERE

    def event(self, *about: Any, **more: Any) -> None:
        """Not written down."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> Timeline:
    return _NOTHING


_NOWHERE = nullcontext(SimpleNamespace())
_NOTHING = _NoTimeline("explored", capacity=0)


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table.copy() | dict.fromkeys(_CONSTANT, _share)


def freeze(parts: Parts) -> bytes:
    """A world between two commands, as it can be copied from."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(parts)
    return file.getvalue()


def thaw(frozen: bytes) -> Parts:
    """One more copy."""
    parts: Parts = pickle.loads(frozen)
    return parts


def serving(
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    lifecycle: Mapping[str, Any] | None = None,
    verify: Mapping[str, Any] | None = None,
    update: str = "full",
    recover: bool = False,
    frozen: Mapping[str, Mapping[str, Any]] | None = None,
    reports_released: bool = False,
    protocol: str = "sglang",
    expect_version: int = 0,
    has_journal: bool = False,
    has_source: bool = False,
) -> bytes:
    """A server that has just started, with the gate open unless it expects a version.

    Args:
        recover: dead engines are replaced when somebody says ``recover``.
        frozen: groups of a second server, whose model is never updated.
        reports_released: engines report what they hold, so that a lost release can be checked.
        protocol: of the engines, ``sglang`` or ``vllm``.
        has_journal: another server can take the place of a lost one.
        has_source: engines can get what was pushed without another push.
    """
    launcher = Launcher(reports_released, protocol)
    parts = Parts({}, {}, {}, launcher, {}, frozenset(), Deployment({}))
    if has_journal:
        parts.records["policy"] = Record("policy")
    phases = {"lifecycle": {**_LIFECYCLE, **(lifecycle or {})}, "verify": verify or {}}
    _add_server(parts, "policy", groups or TWO_BY_TWO, phases, update, recover, has_source)
    if frozen is not None:
        _add_server(parts, "reference", frozen, phases, "frozen", recover)
    parts.deployment = Deployment(parts.servers, lock_timeout_s=LOCK_S)
    done = run(_Start(parts, expect_version), following({}))
    if done.violation:
        raise Violation(done.violation)
    for process in launcher.all:
        process.engine.calls.clear()
    return freeze(parts)


def _add_server(
    parts: Parts,
    server: str,
    groups: Mapping[str, Mapping[str, Any]],
    phases: Mapping[str, Mapping[str, Any]],
    update: str,
    recover: bool,
    has_source: bool = False,
) -> None:
    config = ServerConfig.model_validate(
        {
            "model_path": "/nowhere",
            "groups": {name: {"engine": {"kind": "fake"}, **one} for name, one in groups.items()},
            **phases,
            "weights": {"update": update},
            # No pause between restarts: the plan decides when a restart happens.
            "health": {"recover": recover, "probe_interval_s": 1e6, "backoff_s": 1e-18},
        }
    )
    made = {
        name: ServerGroup(
            GroupSettings(
                name=name,
                path=f"servers.{server}.groups.{name}",
                model_path=config.model_path,
                log_dir="/nowhere",
                group=group,
                update=config.weights.update,
                lifecycle=config.lifecycle,
                verify=config.verify,
                health=config.health,
                sources=(KeptPushes(),) if has_source else (),
            ),
            [EngineSlot(f"{name}-{index}", name, index) for index in range(group.num_engines)],
            parts.launcher,
            parts.launcher.connect,
            timeline=_NOTHING,
        )
        for name, group in config.groups.items()
    }
    ports = {name: Delayed(name, group) for name, group in made.items()}
    parts.routers[server] = SteeredRouter()
    parts.servers[server] = RolloutServer(
        server,
        config,
        ports,
        parts.routers[server],
        timeline=_NOTHING,
        actor_factory=cast(ActorFactory, Successors(parts)),
        journal=cast(ServerJournal | None, parts.records.get(server)),
    )
    parts.groups |= made
    parts.ports |= ports
    parts.offloading |= {
        f"{name}-{index}"
        for name, group in config.groups.items()
        if group.needs_offload
        for index in range(group.num_engines)
    }


def after(frozen: bytes, *commands: str) -> bytes:
    """The same world after these commands, each in its ordinary course."""
    world = World(thaw(frozen), Settings(commands, num_requests=0))
    done = run(world, following({}))
    if done.violation or any(how != "done" for _, how in world.outcomes):
        raise Violation(f"{done.violation} {world.outcomes}")
    return freeze(world.detach())


class _Start:
    """All servers start; their recovery runs only as a command of the plan."""

    def __init__(self, parts: Parts, expect_version: int) -> None:
        self._parts = parts
        self._expect_version = expect_version

    def start(self, loop: ExploredLoop) -> None:
        self._task = loop.create_task(self._begin())

    async def _begin(self) -> None:
        for server in self._parts.servers.values():
            await server.start(self._expect_version)
            await server._recovery.stop()

    def num_options(self) -> int:
        return 0

    def take(self, option: int) -> str:
        return ""

    def check(self) -> None: ...

    def finish(self) -> None:
        self._task.result()
