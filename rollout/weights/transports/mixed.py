"""One push that reaches each engine on a way of its own.

A bucket of such a push is a mapping: the name of a way -> what the engines on that way get.  A
way that is missing in a bucket has nothing for its engines there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pybase64

from rollout.core.errors import WeightMismatch, WeightsUnavailable
from rollout.weights.transports.carriers import Carrier, Payload, PushTarget, Stage


@dataclass(frozen=True, slots=True)
class ByHandles(Carrier):
    """``update_weights_from_tensor`` with CUDA IPC handles: each tensor-parallel rank gets the
    handle of the trainer's rank on its own GPU.

    A payload has the pickle around the handle, which is the same for all ranks, and the handles:
    ``{"head", "tail", "handles": {uuid: handle}}``, all base64.

    Attributes:
        gpus: the UUIDs of the engine's GPUs, in the order of its tensor-parallel ranks.
    """

    gpus: tuple[str, ...] = ()

    @property
    def needs_session(self) -> bool:  # type: ignore[override]
        return True

    def pack(self, payload: Payload) -> Any:
        if isinstance(payload, bytes):
            raise WeightMismatch("a push by handles has a mapping, not bytes")
        head, tail = (pybase64.b64decode(payload[part]) for part in ("head", "tail"))
        return {
            uuid: pybase64.b64encode_as_string(head + pybase64.b64decode(handle) + tail)
            for uuid, handle in payload["handles"].items()
        }

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        if len(self.gpus) != target.payload_copies:
            raise WeightMismatch(
                f"the engine has {target.payload_copies} tensor-parallel ranks, and "
                f"{len(self.gpus)} GPUs when the push was planned"
            )
        await target.engine.update_weights_from_tensor(
            [packed[uuid] for uuid in self.gpus],
            load_format="flattened_bucket",
            flush_cache=stage.is_last,
            weight_version=stage.weight_version,
        )


@dataclass(frozen=True, slots=True)
class Way(Carrier):
    """One way of a mixed push.

    Attributes:
        name: in the buckets; equal for engines that get the same.
        carrier: sends what the buckets have under that name.
    """

    name: str
    carrier: Carrier

    @property
    def needs_session(self) -> bool:  # type: ignore[override]
        return self.carrier.needs_session

    @property
    def joins(self) -> bool:  # type: ignore[override]
        return self.carrier.joins

    def has_part_in(self, packed: Any) -> bool:
        return self.name in packed

    async def join(self, target: PushTarget, terms: Mapping[str, Any]) -> None:
        await self.carrier.join(target, terms)

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        await self.carrier.send(target, packed[self.name], stage)

    async def leave(self, target: PushTarget, group_name: str) -> None:
        await self.carrier.leave(target, group_name)


class _Unplanned(Carrier):
    """Of an engine that was not there when the push was planned."""

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        raise WeightsUnavailable(
            "the engine came after this push was planned, and its GPUs and host were not known"
        )


@dataclass(frozen=True, slots=True)
class Mixed(Carrier):
    """Each engine's own way.

    Attributes:
        ways: engine id -> its way.
    """

    ways: Mapping[str, Way]

    def of(self, engine_id: str) -> Carrier:
        if engine_id in self.ways:
            return self.ways[engine_id]
        others = set(self.ways.values())
        return others.pop() if len(others) == 1 else _Unplanned()

    def pack(self, payload: Payload) -> Any:
        if isinstance(payload, bytes):
            raise WeightMismatch("a mixed push has a mapping of ways, not bytes")
        carriers = {way.name: way.carrier for way in self.ways.values()}
        return {
            name: carriers[name].pack(part) for name, part in payload.items() if name in carriers
        }
