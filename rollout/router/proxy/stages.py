"""The stages of one request, each with its own values, and what can happen to it.

``Receiving`` -> ``Arrived`` -> ``OnEngine``, or ``Held`` -> ``OnEngine``, as often as it goes on
with another engine; from each of them -> ``Ended``, which is the last.

Always true: a request has one place on one engine, or one at the gate, or none; what a stage has is
given back as it is left.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from engines.protocol.adapter_names import Names
from engines.protocol.logprob_kind import LogprobKind
from rollout.router.continuation.contracts import Versions
from rollout.router.continuation.named_weights import NamedWeights
from rollout.router.gate.gate import Admission, ConnectionFailure, Refusal, Waiter
from rollout.router.http.incoming_body import IncomingBody
from rollout.router.http.request import Request
from rollout.router.http.responses import RouterResponse
from rollout.router.proxy.lost_engines import LostEngines
from rollout.router.proxy.prefill_decode import PrefillReply
from rollout.router.proxy.reader_choice import ReadBody
from rollout.router.proxy.token_reader import TokenReader
from rollout.rules.contract import Contract


@dataclass(eq=False, slots=True)
class Generation:
    """What a request asks of engines, and what it has of them so far.

    Attributes:
        reader: reads the tokens of its engines' replies; None: these are passed on as they are.
        is_checked: the contract limits versions.
        pinned: names of weights that it stays with, on every engine.
        versions: of the tokens of earlier engines.
        engine_id: of the last engine it was sent to, or empty before.
        logprob_kind: of that engine's reply.
        failure: why it left the engine before this one.
        lost: engines it lost, or None for none.
        num_attempts: engines it was sent to, less those that did not fail it.
        num_starts: how often it started over because tokens did not fulfil the contract.
    """

    request: Request
    named: NamedWeights
    contract: Contract
    is_checked: bool
    reader: TokenReader | None
    pinned: Names = ()
    versions: Versions | None = None
    engine_id: str = ""
    logprob_kind: LogprobKind | None = None
    failure: ConnectionFailure | None = None
    lost: LostEngines | None = None
    num_attempts: int = 0
    num_starts: int = 0


@dataclass(eq=False, slots=True)
class Receiving:
    """The request arrives, or waits for its turn.

    Attributes:
        body: all of most bodies; of one in several parts, the first.
        parts: a body in several parts, as far as it has arrived, or None for any other.
        is_turn: all responses before its own are complete.
        is_whole: all of it has arrived.
        refusal: its response, which is sent when it is its turn.
    """

    body: bytes = b""
    parts: IncomingBody | None = None
    is_turn: bool = False
    is_whole: bool = False
    refusal: RouterResponse | None = None

    def drop(self) -> None:
        """Its body is not needed."""
        self.body = b""
        if self.parts is not None:
            self.parts.drop()
            self.parts = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """All of the request is there, it is its turn, and its body is read.

    Attributes:
        reading: of a long body, in another process, or None for the router's own.
    """

    reading: asyncio.Future[ReadBody] | None = None

    def drop(self) -> None:
        """Its body is not needed."""
        if self.reading is not None:
            self.reading.cancel()


@dataclass(eq=False, slots=True)
class Held:
    """The request is at the gate: on its way from one engine to the next, or held there.

    Attributes:
        waiter: its place, if it is held.
        timer: ends its wait.
    """

    generation: Generation
    waiter: Waiter | None = None
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class OnEngine:
    """The request has a place on an engine.

    Attributes:
        prefill: the reply of the other engine of a pair.
        status: of a reply that says nothing of its engine so far.
        timer: ends the request, because its end was requested; so it goes to no other engine.
    """

    generation: Generation
    admission: Admission
    prefill: PrefillReply | None = None
    status: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def is_aborted(self) -> bool:
        return self.timer is not None


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has its response, or needs none.

    Attributes:
        is_whole: all of it had arrived.
    """

    is_whole: bool = True

    def drop(self) -> None:
        """There is nothing left."""


Stage = Receiving | Arrived | Held | OnEngine | Ended
ARRIVED, ENDED, ENDED_EARLY = Arrived(), Ended(), Ended(is_whole=False)


class Turn(NamedTuple):
    """All responses before this one are complete."""


class Piece(NamedTuple):
    """More of the request's body."""

    data: bytes


class Pause(NamedTuple):
    """What has arrived is not all of the request."""


class End(NamedTuple):
    """All of the request has arrived."""


class Late(NamedTuple):
    """The request's body arrives too slowly."""


class BodyRead(NamedTuple):
    """A long body was read in the other process."""

    body: bytes
    reading: asyncio.Future[ReadBody]


class ClientLeft(NamedTuple):
    """The client has closed its connection."""


class Flow(NamedTuple):
    """The client does not read what was written, or does again."""

    is_paused: bool


class Decided(NamedTuple):
    """The gate has decided on the held request."""

    decision: Admission | Refusal


class Evicted(NamedTuple):
    """The owner of the engines reports that the request's engine is lost."""

    why: str


class Aborted(NamedTuple):
    """The request's end was requested."""


class AbortOver(NamedTuple):
    """The engine had its time to end an aborted request."""


class Expired(NamedTuple):
    """The request has taken this long, which is too long."""

    after_s: float


class Stopped(NamedTuple):
    """The router stops now."""


Event = (
    Turn
    | Piece
    | Pause
    | End
    | Late
    | BodyRead
    | ClientLeft
    | Flow
    | Decided
    | Evicted
    | Aborted
    | AbortOver
    | Expired
    | Stopped
)
