"""Safetensors files that engine and trainer both see: tmpfs on the same host, or a shared disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout.weights.transports.carrier import PushTarget, SimpleCarrier, Stage


@dataclass(frozen=True, slots=True)
class ByPath(SimpleCarrier):
    """``update_weights_from_disk`` with the folder in ``{"path": ...}``."""

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        await target.engine.update_weights_from_disk(
            packed["path"], flush_cache=stage.is_last, weight_version=stage.weight_version
        )
