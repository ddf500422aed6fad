"""A LoRA adapter in the place of the one of the same name; the base weights stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pybase64

from engines.errors import EngineRejected
from rollout.errors import WeightMismatch
from rollout.weights.transports.carrier import Payload, PushTarget, SimpleCarrier, Stage


@dataclass(frozen=True, slots=True)
class AsAdapter(SimpleCarrier):
    """``load_lora_adapter_from_tensors``, in one bucket.

    Attributes:
        name: by which requests ask for it, as ``lora_path``.
        config: PEFT's ``adapter_config.json``.
    """

    name: str
    config: Mapping[str, Any]

    def pack(self, payload: Payload) -> Any:
        if not isinstance(payload, bytes):
            raise WeightMismatch(f"an adapter travels as bytes, not as {payload!r:.80}")
        return pybase64.b64encode_as_string(payload)

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        engine = target.engine
        # An engine that was started again has none; if it kept the old one, the load says so.
        with suppress(EngineRejected):
            await engine.unload_lora_adapter(self.name)
        await engine.load_lora_adapter_from_tensors(
            self.name, self.config, [packed] * target.payload_copies
        )
        if stage.is_last:
            await engine.flush_cache()
            await engine.update_weight_version(str(stage.version))
