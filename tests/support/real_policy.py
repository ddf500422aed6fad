"""A policy on real SGLang or vLLM: groups of engines behind the real router, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.http.call import Deadlines
from engines.http.client import EngineClient
from engines.launch import RunningEngine
from engines.protocol import Endpoint, Engine, PauseMode
from engines.vllm.client import VllmClient
from rollout.config import RolloutConfig
from rollout.core.types import EngineStatus
from rollout.router.proxy import reader_choice
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.support.cpu_engines import cpu_config

DEADLINES = Deadlines(control_s=60, pause_s=60, memory_s=60, update_s=60, check_s=60, ready_s=10)

TWO_WORKERS = {
    # What ``gpus: 2`` makes of an engine on GPUs.
    "options": {"tensor-parallel-size": 2, "distributed-executor-backend": "mp"},
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
}

TWO_STAGES: dict[str, Any] = {
    "sglang": {"options": {"pp-size": 2}},
    "vllm": {
        "options": {
            "pipeline-parallel-size": 2,
            "distributed-executor-backend": "mp",
            # vLLM 0.32 has stages on a CPU only with its compiler, which then compiles nothing.
            "enforce-eager": False,
        },
        "env": {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_USE_AOT_COMPILE": "0",
            "TORCHDYNAMO_DISABLE": "1",
        },
    },
}
"""An engine with two pipeline stages."""


def one_engine(kind: str = "sglang", **engine: Any) -> dict[str, Any]:
    """A group of one SGLang or vLLM engine on the CPU."""
    return {"num_engines": 1, "engine": cpu_config(kind, **engine)}


def real_config(
    model: Path, folder: Path, groups: Mapping[str, Any], **server: Any
) -> RolloutConfig:
    """One server, ``policy``, with these groups."""
    policy = {"model_path": str(model), "groups": groups, **server}
    return RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": policy}})


def push_nonfinite(policy: ServerHandle, tensors: Any, version: int) -> None:
    """A push of a trainer that allows NaN."""
    name, config, caller = policy.__reduce__()[1]
    weights = config.weights.model_copy(update={"allow_nonfinite": True})
    trainer = ServerHandle(name, config.model_copy(update={"weights": weights}), caller)
    try:
        trainer.push(tensors, version).result(120)
    finally:
        trainer.close()


def process_of(engine: EngineStatus | RunningEngine, name: str) -> int:
    """The pid of its only process whose name begins so; of its API server for no name."""
    assert engine.pid is not None
    if not name:
        return engine.pid
    children = psutil.Process(engine.pid).children(recursive=True)
    # Its whole title: the name has 15 characters.
    (found,) = [one.pid for one in children if " ".join(one.cmdline()).startswith(name)]
    return found


@dataclass
class Sabotage:
    """What the clients of the engines leave out while they say that it was done."""

    pause: bool = False
    flush: bool = False
    keys: bool = False

    def connect(self, endpoint: Endpoint, engine_id: str) -> Engine:
        return _SGLang(self, endpoint, engine_id)

    def connect_vllm(self, endpoint: Endpoint, engine_id: str) -> Engine:
        return _Vllm(self, endpoint, engine_id)


class _Sabotaged:
    """Over a client; both kinds have these methods."""

    def __init__(self, sabotage: Sabotage, endpoint: Endpoint, engine_id: str) -> None:
        super().__init__(endpoint, engine_id=engine_id, deadlines=DEADLINES)  # type: ignore[call-arg]
        self._sabotage = sabotage

    async def pause_generation(self, mode: PauseMode = PauseMode.ABORT) -> None:
        if not self._sabotage.pause:
            await super().pause_generation(mode)

    async def flush_cache(self, timeout_s: float | None = None) -> None:
        if not (self._sabotage.pause or self._sabotage.flush):
            await super().flush_cache(timeout_s)

    async def generate(self, *args: Any, **settings: Any) -> dict[str, Any]:
        keys = {"extra_key": None} if self._sabotage.keys else {}
        reply: dict[str, Any] = await super().generate(*args, **settings | keys)  # type: ignore[misc]
        return reply

    async def update_weights_from_tensor(self, *args: Any, **settings: Any) -> None:
        await super().update_weights_from_tensor(*args, **self._left_out(settings))

    async def update_weights_from_disk(self, *args: Any, **settings: Any) -> None:
        await super().update_weights_from_disk(*args, **self._left_out(settings))

    def _left_out(self, settings: dict[str, Any]) -> dict[str, Any]:
        return settings | {"flush_cache": False} if self._sabotage.flush else settings


class _SGLang(_Sabotaged, EngineClient):
    """SGLang's."""


class _Vllm(_Sabotaged, VllmClient):
    """vLLM's."""


@dataclass
class RealPolicy:
    """What a test drives.

    Attributes:
        handle: the server.
        models: checkpoints of one shape; version ``v`` is the weights of number ``v % len``.
        log_dir: where the engines log.
    """

    handle: ServerHandle
    models: list[Path]
    log_dir: Path
    sabotage: Sabotage
    _tensors: dict[Path, Any] = field(default_factory=dict, repr=False)

    def weights_of(self, version: int) -> Path:
        return self.models[version % len(self.models)]

    def tensors_of(self, version: int) -> Any:
        from safetensors.torch import load_file

        path = self.weights_of(version)
        if path not in self._tensors:
            self._tensors[path] = load_file(path / "model.safetensors")
        return self._tensors[path]

    def engines(self) -> list[EngineStatus]:
        """As they are known now."""
        status = self.handle.status().result(30)
        return [engine for group in status.groups for engine in group.engines]

    def identities(self) -> dict[str, tuple[int, float]]:
        """Pid and start time of each engine that is alive and not fenced."""
        return {
            one.engine_id: (one.pid, psutil.Process(one.pid).create_time())
            for one in self.engines()
            if one.pid is not None and not one.fence_reason
        }

    def log_of(self, engine_id: str) -> str:
        (log,) = self.log_dir.rglob(f"{engine_id}.log")
        return log.read_text(errors="replace")

    def is_whole(self) -> bool:
        """Whether every engine serves and no sabotage is pending."""
        status = self.handle.status().result(30)
        states = {engine.state for group in status.groups for engine in group.engines}
        return (status.phase, status.gate, states) == (
            "serving",
            "open",
            {"serving"},
        ) and self.sabotage == Sabotage()

    def next_tensors(self) -> Any:
        """Those of the version that the next push makes."""
        return self.tensors_of(self.handle.weight_version + 1)


@contextmanager
def real_policy(
    models: list[Path], folder: Path, groups: Mapping[str, Any], **server: Any
) -> Iterator[RealPolicy]:
    sabotage = Sabotage()
    config = real_config(models[0], folder, groups, **server)
    kinds = {group["engine"]["kind"] for group in groups.values()}
    connect = sabotage.connect_vllm if kinds == {"vllm"} else sabotage.connect
    with launch_local(config, connect=connect) as deployment:
        yield RealPolicy(deployment["policy"], models, folder, sabotage)


@contextmanager
def saved_every_4_tokens() -> Iterator[None]:
    """The router saves the state of a request more often than it does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_choice, "FAILOVER_INTERVAL", 4)
        yield


class Keeper:
    """Starts a policy of two groups when it is first wanted, and again after a test that lost it.

    Args:
        models: see ``RealPolicy``.
        group: of one engine each.
    """

    def __init__(self, models: list[Path], folder: Path, group: Mapping[str, Any]) -> None:
        self.models = models
        self._folder = folder
        self._group = group
        self._stack = ExitStack()
        self._policy: RealPolicy | None = None

    def policy(self) -> RealPolicy:
        if self._policy is None:
            groups = dict.fromkeys(("left", "right"), self._group)
            self._stack.enter_context(saved_every_4_tokens())
            self._policy = self._stack.enter_context(real_policy(self.models, self._folder, groups))
        return self._policy

    def look(self) -> None:
        """End it if it does not serve as a test found it."""
        if self._policy is not None and not self._policy.is_whole():
            self.close()

    def close(self) -> None:
        self._policy = None
        self._stack.close()
