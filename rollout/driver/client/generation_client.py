"""The interface between the driver and what serves its requests: a router, one engine, a fake."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from engines.protocol import GenerateReply, SamplingParams
from engines.protocol.logprob_kind import LogprobRule
from rollout.rules.contract import NO_CONTRACT, Contract


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request for a completion.

    Attributes:
        rid: request id, never used twice; requests that may be aborted together share a prefix.
        affinity: requests with the same one prefer the same engine.
        fields: more fields of the body, with SGLang's names.
        fails_over: the router keeps its tokens, so that another engine can continue it.
        timeout_s: until its last byte, including time held at the gate; None: the client's.
        contract: what each of its tokens fulfils, or there is no reply.  Without ``fails_over`` its
            client checks the lag.
    """

    rid: str
    input_ids: Sequence[int]
    sampling: SamplingParams
    affinity: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    fails_over: bool = False
    timeout_s: float | None = None
    contract: Contract = NO_CONTRACT


class FailureKind(StrEnum):
    """Why a request had no reply.

    Final are ``refused``; ``too_long``: an engine's context has no room for the prompt; and what
    the contract rules out: ``version``, with the weights that are served, and ``logprob_kind``,
    with all engines.  ``unavailable``: try again later.  ``needs_push``: no request is answered
    before a push of weights.  ``lost``: the connection or the engine ended, another engine may be
    tried.  ``aborted``: ended before its first token.
    """

    REFUSED = "refused"
    TOO_LONG = "too_long"
    VERSION = "version"
    LOGPROB_KIND = "logprob_kind"
    UNAVAILABLE = "unavailable"
    NEEDS_PUSH = "needs_push"
    LOST = "lost"
    ABORTED = "aborted"


_FINAL = frozenset(
    {FailureKind.REFUSED, FailureKind.TOO_LONG, FailureKind.VERSION, FailureKind.LOGPROB_KIND}
)
# In the refusals of the embedded engine, SGLang and vLLM, whose status is that of all bad requests.
_HAS_NO_ROOM = re.compile(r"context length|maximum model length", re.IGNORECASE)


def kind_of_refusal(text: str) -> FailureKind:
    """``too_long`` or ``refused``, by the words of an engine that refuses a request."""
    return FailureKind.TOO_LONG if _HAS_NO_ROOM.search(text) else FailureKind.REFUSED


class GenerationError(Exception):
    """A request had no reply.

    Attributes:
        retry_after_s: seconds until the next try, as the server requests; 0 if it does not.
        weight_version: what could be had instead, of kind ``version``, or None if it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: FailureKind = FailureKind.REFUSED,
        retry_after_s: float = 0.0,
        weight_version: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.weight_version = weight_version

    @property
    def is_final(self) -> bool:
        """Whether another try would be answered alike."""
        return self.kind in _FINAL


class Disconnected(GenerationError):
    """The connection was lost, or the router has just started: the same request may be sent again,
    and the router goes on from the tokens that it keeps."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engines behind a client are.

    Attributes:
        num_engines: engines that serve now.
        num_running, num_waiting: requests that decode, and that wait for room, in all engines.
        kv_use: used share of the fullest engine's KV cache, or None if not reported.
        weight_version: of the weights that answer the client's requests, or None if not reported.
        why_waiting: why requests wait at the gate.
        logprobs: at which step of sampling the engines take their log-probs, or empty if not
            reported.
        why_closed: why the gate turns requests away.
    """

    num_engines: int
    num_running: int = 0
    num_waiting: int = 0
    kv_use: float | None = None
    weight_version: int | None = None
    why_waiting: str = ""
    logprobs: tuple[LogprobRule, ...] = ()
    why_closed: str = ""


class GenerationClient(Protocol):
    """The driver's connection to the engines."""

    async def generate(self, request: GenerationRequest) -> GenerateReply:
        """One completion.  An aborted one has its tokens and the finish reason ``abort``.

        Raises:
            GenerationError: there is no reply.
        """
        ...

    async def abort(self, rids: Sequence[str], *, prefix: str = "") -> None:
        """End the requests with these ids; each of them then gets its reply.

        An unknown id is no error.

        Args:
            prefix: those whose ids begin with it, too, or empty for none.
        """
        ...

    async def load(self) -> EngineLoad | None:
        """How busy the engines are, or None if that is unknown."""
        ...

    async def server_metrics(self) -> Mapping[str, float]:
        """Metrics ``server/...`` of the last step boundary, or empty if they are unknown."""
        ...

    async def report(self, figures: Mapping[str, Any]) -> None:
        """Send the metrics of a step to the server's page.  May be lost; raises nothing."""
        ...

    async def close(self) -> None: ...
