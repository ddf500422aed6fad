"""A running server whose pushes have other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout.runtime.handle import DeploymentHandle, ServerHandle


def with_settings(deployment: DeploymentHandle, shm: Path, **weights: Any) -> ServerHandle:
    """The same server, pushed to in another way."""
    policy = deployment["policy"]
    config = deployment.config.servers["policy"]
    settings = {"bucket_bytes": 100_000, "shared_memory_path": str(shm), **weights}
    changed = config.weights.model_validate({**config.weights.model_dump(), **settings})
    return ServerHandle("policy", config.model_copy(update={"weights": changed}), policy._caller)
