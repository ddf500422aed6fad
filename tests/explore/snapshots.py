"""Worlds to start from: built once, then copied by pickle, which is quicker than starting one."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from engines.protocol import Endpoint, TensorInfo, WeightsReport
from rollout.config import (
    EngineConfig,
    GroupConfig,
    HealthConfig,
    LifecycleConfig,
    RouterConfig,
    ServerConfig,
    WeightsConfig,
)
from rollout.lifecycle import Traits
from rollout.policy import ReleasePolicy
from rollout.routing import Member
from rollout.server import RolloutServer
from rollout.server_group import GroupSettings, ServerGroup
from rollout.testing.explore import ExploredLoop, Violation, following, run
from rollout.timeline.recorder import Timeline
from rollout.types import EngineSlot, GroupStatus
from rollout.weights.manifest import Manifest
from tests.explore.world import (
    BUDGET_S,
    LOCK_S,
    STOP_S,
    Delayed,
    Launcher,
    Parts,
    Settings,
    SteeredRouter,
    World,
)

# One group that shares its GPUs with the trainer, one that keeps its own.
TWO_BY_TWO: dict[str, dict[str, Any]] = {
    "shared": {"num_engines": 2},
    "apart": {"num_engines": 2, "needs_offload": False},
}
_LIFECYCLE = {
    f"{phase}_timeout_s": BUDGET_S
    for phase in ("pause", "flush", "release", "resume", "update", "verify", "continue")
} | {"stop_timeout_s": STOP_S, "lock_timeout_s": LOCK_S}

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
    GroupConfig,
    GroupSettings,
    GroupStatus,
    HealthConfig,
    LifecycleConfig,
    Manifest,
    Member,
    ReleasePolicy,
    RouterConfig,
    ServerConfig,
    TensorInfo,
    Traits,
    WeightsConfig,
    WeightsReport,
)


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
    update: str = "full",
) -> bytes:
    """A server that has just started, with the gate open."""
    config = ServerConfig.model_validate(
        {
            "model_path": "/nowhere",
            "groups": groups or TWO_BY_TWO,
            "lifecycle": {**_LIFECYCLE, **(lifecycle or {})},
            "weights": {"update": update},
            "health": {"recover": False},
        }
    )
    launcher = Launcher()
    made = {
        name: ServerGroup(
            GroupSettings(
                name=name,
                path=f"servers.policy.groups.{name}",
                model_path=config.model_path,
                log_dir="/nowhere",
                group=group,
                update=config.weights.update,
                lifecycle=config.lifecycle,
            ),
            [EngineSlot(f"{name}-{index}", name, index) for index in range(group.num_engines)],
            launcher,
            launcher.connect,
            # What happened is no part of a world: nothing of it is kept, nor copied.
            timeline=Timeline(f"policy/{name}", capacity=0),
        )
        for name, group in config.groups.items()
    }
    ports = {name: Delayed(name, group) for name, group in made.items()}
    router = SteeredRouter()
    server = RolloutServer("policy", config, ports, router, timeline=Timeline("policy", capacity=0))
    offloading = frozenset(
        f"{name}-{index}"
        for name, group in config.groups.items()
        if group.needs_offload
        for index in range(group.num_engines)
    )
    parts = Parts(server, made, ports, launcher, router, offloading)
    done = run(_Start(parts), following({}))
    if done.violation:
        raise Violation(done.violation)
    for process in launcher.all:
        process.engine.calls.clear()
    return freeze(parts)


def after(frozen: bytes, *commands: str) -> bytes:
    """The same world after these commands, each in its ordinary course."""
    world = World(thaw(frozen), Settings(commands, num_requests=0))
    done = run(world, following({}))
    if done.violation or any(how != "done" for _, how in world.outcomes):
        raise Violation(f"{done.violation} {world.outcomes}")
    return freeze(world.detach())


class _Start:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def start(self, loop: ExploredLoop) -> None:
        self._task = loop.create_task(self._parts.server.start())

    def num_options(self) -> int:
        return 0

    def take(self, option: int) -> str:
        return ""

    def check(self) -> None: ...

    def finish(self) -> None:
        self._task.result()
