"""A LoRA adapter: one bucket, which replaces the adapter of the same name; the base stays."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from engines.protocol.errors import EngineRejected
from rollout.core.errors import WeightMismatch
from rollout.weights.routes.by_value import ValueBuilder, join
from rollout.weights.routes.rank_end import Places, RankEnd, RouteRow
from rollout.weights.routes.route import (
    Chosen,
    EnginePlace,
    Payload,
    PushTarget,
    Route,
    Stage,
    encoded,
)

if TYPE_CHECKING:
    from rollout.weights.tensors.sources import Pairs

ADAPTER = "adapter"


def reach(ranks: Places, engine: EnginePlace) -> Chosen:
    return Chosen(ADAPTER)


@dataclass(frozen=True, slots=True)
class AsAdapter(Route):
    """``load_lora_adapter_from_tensors``.

    Attributes:
        name: the value of ``lora_path`` in requests.
        config: PEFT's ``adapter_config.json``.  It is read back from JSON, so that every engine
            can be sent it.

    Raises:
        WeightMismatch: JSON cannot express the config.
    """

    name: str
    config: Mapping[str, Any] = field(hash=False)

    def __post_init__(self) -> None:
        try:
            config = orjson.loads(orjson.dumps(dict(self.config)))
        except TypeError as error:
            raise WeightMismatch(
                f"an adapter's config must consist of values of JSON: {error}"
            ) from None
        object.__setattr__(self, "config", config)

    def pack(self, payload: Payload) -> Any:
        return encoded(payload, "an adapter travels as bytes")

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        engine = target.engine
        # A restarted engine has no adapter.  If the unload failed otherwise, the load fails too.
        with suppress(EngineRejected):
            await engine.unload_lora_adapter(self.name)
        await engine.load_lora_adapter_from_tensors(
            self.name, self.config, [packed] * target.payload_copies
        )
        if stage.is_last:
            await engine.flush_cache()
            await engine.update_weight_version(str(stage.version))


class AdapterBuilder(ValueBuilder):
    """Pickles the only bucket, on rank 0, as SGLang loads an adapter."""

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any]:
        from rollout.weights.tensors.payload import adapter_payload

        return {"values": [adapter_payload(pairs)]}


def open_share(end: RankEnd, chosen: Chosen) -> AdapterBuilder | None:
    """Rank 0 sends."""
    return AdapterBuilder() if end.rank == 0 else None


ROW = RouteRow(
    ADAPTER,
    reach,
    lambda chosen: AsAdapter(chosen.adapter, chosen.config),
    open_share,
    join,
    is_automatic=False,
)
