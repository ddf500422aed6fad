"""What every carrier does, and what it is told.

Always true: a carrier is a plain value, so a push can travel to where the engines are; it imports
no tensor library and knows one engine at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engines.protocol import Engine

Payload = bytes | Mapping[str, Any]
"""A bucket on its way: the bytes of its tensors, or words that say where they are."""


@dataclass(frozen=True, slots=True)
class PushTarget:
    """One engine of a push.

    Attributes:
        payload_copies: its tensor-parallel ranks: SGLang wants a payload for each.
        has_session: it wants the update between begin and end (SGLang 0.5.21 and later).
        process: what tells its process from any other; empty where nobody knows.
        takes_flat: a broadcast may bring it many tensors as one.
        tells_groups: it says which groups for broadcasts it is in.
    """

    engine: Engine
    payload_copies: int = 1
    has_session: bool = True
    process: str = ""
    takes_flat: bool = False
    tells_groups: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """Where in a push a bucket stands."""

    version: int
    is_last: bool = True

    @property
    def weight_version(self) -> str | None:
        """What the engine shall report from now on; None until the last bucket."""
        return str(self.version) if self.is_last else None


class Carrier(Protocol):
    """Brings the buckets of one push to engines.

    Attributes:
        needs_session: whether its updates belong between begin and end of a weight update.
        joins: whether the engines must join a group before the first bucket.
    """

    @property
    def needs_session(self) -> bool: ...
    @property
    def joins(self) -> bool: ...

    async def join(self, target: PushTarget, terms: Mapping[str, Any]) -> None:
        """Make ready to receive; ``terms`` are the trainer's, with this engine's first rank."""
        ...

    def pack(self, payload: Payload) -> Any:
        """A bucket as ``send`` wants it: once for all engines, in a thread."""
        ...

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        """Give one engine one bucket; with the last one version and flush."""
        ...

    async def leave(self, target: PushTarget, group_name: str) -> None:
        """Undo ``join``, also after a failure, and where the engine has left by itself."""
        ...


class SimpleCarrier:
    """A carrier that needs no group and sends payloads as they are: what others begin from."""

    needs_session = False
    joins = False

    async def join(self, target: PushTarget, terms: Mapping[str, Any]) -> None:
        """Nothing to join."""

    def pack(self, payload: Payload) -> Any:
        return payload

    async def leave(self, target: PushTarget, group_name: str) -> None:
        """Nothing to leave."""
