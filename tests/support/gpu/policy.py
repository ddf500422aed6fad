"""A policy of one engine on the GPU of a test."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from rollout.config import RolloutConfig
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.support.engine_keys import Keys, client_of
from tests.support.gpu.machine import Gpu
from tests.support.gpu.model import NUM_TOKENS, load_tensors

TIMEOUT_S = 180.0
PROMPT = list(range(40, 60))
# All these deaths are ours: none of them is a reason to wait with the next start.
_HEALTH = {"probe_interval_s": 0.5, "max_restarts": 100, "backoff_s": 0.1, "max_backoff_s": 0.1}


@dataclass
class OneEngine:
    """The policy, its GPU, and the tensors that its engine started from, on the GPU."""

    gpu: Gpu
    handle: ServerHandle
    model: Path
    tensors: dict[str, Any] = field(repr=False)

    @property
    def engine(self) -> EngineStatus:
        (group,) = self.handle.status().result(TIMEOUT_S).groups
        (engine,) = group.engines
        return engine

    @property
    def state(self) -> str:
        return self.engine.state

    def tokens(self) -> list[int]:
        """What it generates, greedily."""
        sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling}
        return list(self.generate(body)["output_ids"])

    def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The reply of the router to a request."""
        url = f"{self.handle.url}/generate"
        reply = httpx.post(url, json=body, timeout=TIMEOUT_S, trust_env=False)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def fingerprints(self) -> dict[str, str]:
        """Of what an embedded engine holds, by its own word."""
        endpoint = self.engine.endpoint
        assert endpoint is not None
        url = f"{endpoint.url}/weights_checker"
        reply = httpx.post(url, json={}, timeout=TIMEOUT_S, trust_env=False, auth=Keys(self.engine))
        found: dict[str, str] = reply.json()["ranks"][0]["checksums"]
        return found

    def memory_by_tag(self) -> dict[str, int]:
        """Bytes of each tag, as the engine reports them."""

        async def ask() -> dict[str, int]:
            client = client_of(self.engine, engine_id="main-0")
            try:
                return dict((await client.server_info()).resident_bytes)
            finally:
                await client.aclose()

        return asyncio.run(ask())

    def kill(self) -> int:
        """SIGKILL to the engine; its pid."""
        pid = self.engine.pid
        assert pid is not None
        psutil.Process(pid).send_signal(signal.SIGKILL)
        return pid


def embedded_engine(gpu: Gpu, num_tokens: int = 0) -> dict[str, Any]:
    """Settings of an embedded engine."""
    options = {
        "dtype": "bfloat16",
        "max-total-tokens": num_tokens or NUM_TOKENS[gpu.device],
        "log-level": "warning",
    }
    return {"kind": "embedded", "gpus": 1, "cpus": 1, "options": options}


@contextmanager
def one_engine(
    gpu: Gpu, model: Path, log_dir: Path, engine: Mapping[str, Any] | None = None, **weights: Any
) -> Iterator[OneEngine]:
    """Start it; ``weights`` are the server's settings of that name.

    Args:
        engine: its settings; by default those of an embedded one.
    """
    policy = {
        "model_path": str(model),
        "groups": {"main": {"num_engines": 1, "engine": engine or embedded_engine(gpu)}},
        "health": _HEALTH,
        "weights": {"transport": "cuda_ipc" if gpu.is_real else "shared_memory", **weights},
    }
    config = {"log_dir": str(log_dir), "servers": {"policy": policy}}
    with launch_local(RolloutConfig.from_dict(config)) as deployment:
        yield OneEngine(gpu, deployment["policy"], model, load_tensors(model, gpu))
