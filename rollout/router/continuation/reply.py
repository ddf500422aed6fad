"""One reply that is read from the engines' bytes, and written for its client."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engines.protocol.logprob_kind import LogprobKind, LogprobRule
from rollout.router.continuation.core import Continuation, Payload, RefusedByEngine
from rollout.router.http.fast_json import Data, dumps, loads

END = sys.maxsize
_ONLY_SGLANG = frozenset({"sglang"})
_PROCESSOR = "custom_logit_processor"


class Reply(Continuation):
    """The reply to one request.

    Attributes:
        route: of the request.
        engine: how the current engine is spoken to.
        rid: the request's id, which its client knows.
        sent_as: its id at the current engine.
        wants_whole_reply: the engine must send one complete reply instead of events.
        passes_on: the engine's last event may be the reply, if one engine does all.
        passed_on: the complete reply in parts, if it is the engine's own.
    """

    route: Route
    engine: EngineDialect
    rid = sent_as = ""
    wants_whole_reply = False
    passes_on = False
    passed_on: list[Data] | None = None

    def kind_by(self, rule: LogprobRule) -> LogprobKind | None:
        """The kind of an engine's log-probs for this request, or None if its sampling is not
        read."""
        return self.route.kind_of(self.raw, rule)

    def body(self, version: int | None = None, dialect: str = "sglang") -> bytes:
        """The body for the next engine, which holds weight ``version`` and has this dialect."""
        self.version = version
        self.engine = self.route.engines[dialect]
        return self.engine.body_after(self)

    def take(self, data: bytes, begin: int = 0, end: int = END) -> Payload | None:
        """Take one event as it came, which is this part of ``data``.

        Returns:
            It, if it is an error, and otherwise None.

        Raises:
            ``UNUSABLE``: it cannot be read.
        """
        payload = self.parsed(data[begin:end])
        if "error" in payload:
            return dict(payload)
        try:
            self.absorb(payload)
        except RefusedByEngine as error:
            return error.payload
        return None

    def may_leave_out(self, data: bytes, begin: int, end: int) -> bool:
        """Whether what this event says stands in the next ones too, of which there are several."""
        return False

    def parsed(self, event: bytes) -> Payload:
        """An event.

        Raises:
            ValueError: it is not JSON.
        """
        payload: Payload = loads(event)
        return payload

    def absorb(self, event: Payload) -> None:
        """Take one event that was parsed."""
        self.engine.event(self, event)

    def own_id(self, reported: Any) -> Any:
        """An id in an engine's reply, with the request's own one in it."""
        is_ours = bool(self.sent_as) and isinstance(reported, str)
        return reported.replace(self.sent_as, self.rid) if is_ours else reported

    def read_all(self) -> None:
        """Parse the events that were taken and not parsed so far."""

    @property
    def end_versions(self) -> tuple[str, str] | None:
        """The weight versions of the first and the last token so far, or None without any."""
        first, last = self.base.spans or self.now.spans, self.now.spans or self.base.spans
        return (first[0].version, last[-1].version) if first else None

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """The client requests log-probs of the prompt, and no prefill engine has sent them."""
        return False

    def why_not_taken(self, dialects: Iterable[str]) -> str:
        """Why engines of these dialects cannot answer it."""
        return next(
            filter(None, (self.route.engines[dialect].why_not(self) for dialect in dialects)), ""
        )

    def new_payloads(self) -> list[Payload]:
        """New events for a streaming client."""
        return self.route.chunks(self)

    def payload(self) -> Payload:
        """The response so far, in the form of a single engine's reply."""
        self.read_all()
        return self.route.whole(self)

    def written(self) -> list[Data]:
        """The response as it is written, in parts."""
        return [dumps(self.payload())] if self.passed_on is None else self.passed_on


@dataclass(frozen=True, slots=True)
class EngineDialect:
    """How one kind of engine is spoken to on one route.

    Attributes:
        body_after: the body for the next engine, which goes on after the tokens that were kept.
        event: takes what an engine sends in one event, or in one complete reply.
        why_not: why no such engine can answer this request.
        gives_ids: it streams the id of each token.
        is_translated: its bodies and events are not those of the client's route.
    """

    body_after: Callable[[Reply], bytes]
    event: Callable[[Reply, Payload], None]
    why_not: Callable[[Reply], str] = lambda reply: ""
    gives_ids: bool = True
    is_translated: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """How a client is spoken to on one route, and the engines that answer there.

    Attributes:
        read: the reply to a body, by the tokens between two events of an engine and the dialects of
            all engines, or None if it cannot continue on another engine, or has a form that only an
            engine can judge.
        chunks: what is new, as events for a streaming client.
        whole: the complete reply.
        engines: by their dialect.
        nests_sampling: the sampling parameters are an object in the body.
    """

    read: Callable[[bytes, int, frozenset[str]], Reply | None]
    chunks: Callable[[Reply], list[Payload]]
    whole: Callable[[Reply], Payload]
    engines: Mapping[str, EngineDialect]
    nests_sampling: bool = False

    def kind_of(self, raw: Payload, rule: LogprobRule) -> LogprobKind | None:
        """The kind of an engine's log-probs for this body, or None if it has several."""
        if not self.nests_sampling:
            return rule.kind_of(raw, has_defaults=True)
        sampling = raw.get("sampling_params") or {}
        several = sampling if isinstance(sampling, list) else [sampling]
        # SGLang has it beside them.
        more = {_PROCESSOR: raw[_PROCESSOR]} if raw.get(_PROCESSOR) else {}
        kinds = {rule.kind_of({**each, **more}) for each in several if isinstance(each, Mapping)}
        return kinds.pop() if len(kinds) == 1 else None

    def reply(
        self, body: bytes, interval: int = 1, dialects: frozenset[str] = _ONLY_SGLANG
    ) -> Reply | None:
        """What ``read`` gives, ready to take an engine's reply."""
        reply = self.read(body, interval, dialects)
        if reply is not None:
            reply.route = self
        return reply
