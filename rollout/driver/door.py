"""What the driver needs of whatever stands before the engines: a router, one engine, a fake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from engines.protocol import GenerateReply, SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        rid: its id, never used twice.  All are of one width, for engines abort by prefix, and
            those that may have to be aborted together begin alike.
        session_id: asks with the same one want the same engine.
    """

    rid: str
    input_ids: Sequence[int]
    sampling: SamplingParams
    session_id: str = ""


class Trouble(StrEnum):
    """Why an ask had no reply.

    ``refused`` is final; ``unavailable`` says come again; ``lost`` says that the connection or
    the engine ended, so that another may be asked; ``aborted`` was ended before its first token.
    """

    REFUSED = "refused"
    UNAVAILABLE = "unavailable"
    LOST = "lost"
    ABORTED = "aborted"


class DoorError(Exception):
    """An ask that had no reply.

    Attributes:
        retry_after_s: when to come again, as the door says; 0 where it does not.
    """

    def __init__(
        self, message: str, *, trouble: Trouble = Trouble.REFUSED, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.trouble = trouble
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engines behind a door are.

    Attributes:
        num_engines: that serve now.
        num_running, num_waiting: requests that decode, and that wait for room, in all of them.
        kv_use: share of the fullest engine's KV cache; None where not told.
        weight_version: what they hold; None where not told.
    """

    num_engines: int
    num_running: int = 0
    num_waiting: int = 0
    kv_use: float | None = None
    weight_version: int | None = None


class Door(Protocol):
    """The driver's way to the engines."""

    async def generate(self, ask: Ask) -> GenerateReply:
        """One completion; an aborted one has its tokens and the reason ``abort``.

        Raises:
            DoorError: there is no reply.
        """
        ...

    async def abort(self, rids: Sequence[str]) -> None:
        """End these, or all that begin so; each is then answered.

        One that is not there (any more) is no error.
        """
        ...

    async def load(self) -> Load | None:
        """How busy the engines are; None where that cannot be told."""
        ...

    async def report(self, told: Mapping[str, Any]) -> None:
        """Figures of a step, for people; may be lost, and raises nothing."""
        ...

    async def close(self) -> None: ...
