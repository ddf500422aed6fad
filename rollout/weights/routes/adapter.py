"""A LoRA adapter: one bucket, which engines load beside its other versions; the base stays."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from engines.protocol.adapter_names import engine_name
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
        name: of the adapter; engines know each version by a name of its own.
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

    async def load(self, target: PushTarget, packed: Any, version: int) -> Mapping[str, str]:
        """Load a version; returns what the engine reports of it, see ``Engine``."""
        name = engine_name(self.name, version)
        # What an earlier call has left.  If the unload fails otherwise, the load fails too.
        with suppress(EngineRejected):
            await target.engine.unload_lora_adapter(name)
        return await target.engine.load_lora_adapter_from_tensors(
            name, self.config, [packed] * target.payload_copies
        )


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
