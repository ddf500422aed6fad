"""Configurations over fake engines that listen, and the test's side of such engines."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from engines.fake import FakeEngine
from engines.fake.http_fake import HttpFakeLauncher
from engines.launch import EngineSpec
from engines.protocol import Endpoint
from engines.protocol.errors import EngineNotReady
from rollout.config import RolloutConfig
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from tests.support.builders import TWO_GROUPS, with_kinds, write_checkpoint
from tests.support.engine_keys import Keys, Reachable

TIMEOUT_S = 30
SMALL_BUCKETS = {"weights": {"bucket_bytes": 600}}


def config(
    folder: Path,
    groups: Mapping[str, Any] = TWO_GROUPS,
    *,
    health: Mapping[str, Any] | None = None,
    page: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    **more: Any,
) -> RolloutConfig:
    """One server, ``policy``, over a checkpoint with the fake's tensors.

    It has workers of agents only if the test gives it some: each is a process.
    """
    of_server = {
        "agents": {"workers": 0},
        "model_path": write_checkpoint(folder),
        "groups": with_kinds(groups),
        "health": dict(health or {}),
        "page": dict(page or {}),
        **(server or {}),
    }
    return RolloutConfig.from_dict(
        {"log_dir": str(folder), "servers": {"policy": of_server}, **more}
    )


def stacked_config(folder: Path) -> RolloutConfig:
    """A policy of two engines and a frozen reference of one, all on the trainer's two GPUs."""
    servers = {
        name: {
            "model_path": write_checkpoint(folder),
            "agents": {"workers": 0},
            "weights": {"update": update},
            "groups": {
                "main": {"num_engines": num, "engine": {"kind": "fake", "gpus": 2 // num}},
            },
        }
        for name, num, update in (("policy", 2, "full"), ("reference", 1, "frozen"))
    }
    return RolloutConfig.from_dict(
        {"log_dir": str(folder), "cluster": {"trainer_gpus": 2}, "servers": servers}
    )


@contextmanager
def launched(launch: Any, *args: Any, **kwargs: Any) -> Iterator[DeploymentHandle]:
    handle = launch(config(*args, **kwargs), launcher=HttpFakeLauncher())
    try:
        yield handle
    finally:
        handle.stop()


def fail_to_make(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    raise EngineNotReady(f"engine {spec.engine_id} ended while starting: no such model layer")


class ServedEngine:
    """One fake engine from outside."""

    def __init__(self, engine: Reachable) -> None:
        self._client = httpx.Client(
            base_url=engine.endpoint.url, timeout=TIMEOUT_S, trust_env=False, auth=Keys(engine)
        )

    def hold(self, operation: str) -> None:
        self._post("/fake/hold", operation=operation)

    def wait_entered(self, operation: str) -> None:
        self._post("/fake/entered", operation=operation)

    def open(self, operation: str) -> None:
        self._post("/fake/open", operation=operation)

    def fail_next(self, operation: str, body: str) -> None:
        self._post("/fake/fail", operation=operation, body=body)

    def kill(self) -> None:
        self._post("/fake/kill")

    def checksum(self) -> str:
        return self._post("/weights_checker", action="checksum")["per_engine_checksum"]

    def requests(self, path: str) -> list[tuple[float, float]]:
        """When each request of ``path`` came and when it was answered."""
        told = self._client.get("/fake/requests").json()
        return [(came, answered) for name, came, answered in told if name == path]

    def _post(self, path: str, **body: str) -> Any:
        return self._client.post(path, json=body).raise_for_status().json()

    def close(self) -> None:
        self._client.close()


@contextmanager
def engines_of(server: ServerHandle) -> Iterator[dict[str, ServedEngine]]:
    """The engines of ``server``, by id."""
    groups = server.status().result(TIMEOUT_S).groups
    engines = {
        engine.engine_id: ServedEngine(engine) for group in groups for engine in group.engines
    }
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.close()
