"""A request whose reply is passed on as it is, of one completion or several (pure).

Its client gets the engine's payloads, which are parsed and written again; tokens of ``/generate``
are checked.  A lost engine's work is not kept: the request starts over, unless its client has a
part of the reply.
"""

from __future__ import annotations

from typing import Any

from engines.http.reply_check import check_generate
from engines.protocol.logprob_kind import LogprobKind, LogprobRule
from rollout.router.continuation.core import Payload, Reported
from rollout.router.continuation.parameters import NotCarried
from rollout.router.continuation.reply import Reply

_OF_GENERATE = frozenset({"meta_info", "output_ids"})


class ForwardedReply(Reply):
    """A reply on any route.

    Args:
        body: the client's, which every engine gets.
        is_streamed: the client wants events.
        needs_logprobs: a reply of ``/generate`` without log-probs cannot be used.
    """

    def __init__(self, body: bytes, *, is_streamed: bool, needs_logprobs: bool = False) -> None:
        super().__init__({"stream": is_streamed}, why_not=NotCarried("forwarded"))
        self.wants_whole_reply = not is_streamed
        self._body = body
        self._payloads: list[Any] = []
        self._has_sent = False
        self._needs_logprobs = needs_logprobs
        self._num_checked: dict[Any, int] = {}  # tokens of each completion
        self._versions: set[str] = set()
        self._has_spans = True

    def kind_by(self, rule: LogprobRule) -> LogprobKind | None:
        return None

    def body(self, version: int | None = None, dialect: str = "sglang") -> bytes:
        return self._body

    def absorb(self, event: Any) -> None:
        for payload in event if isinstance(event, list) else [event]:
            self._check(payload)
        self._payloads.append(event)
        if self.wants_whole_reply:
            self.read_all()

    def _check(self, payload: Any) -> None:
        """Check a completion of ``/generate``; raises as ``UNUSABLE`` has.

        What has come before is checked again with its last event, not with each.
        """
        if not isinstance(payload, dict) or not payload.keys() >= _OF_GENERATE:
            return
        meta, num = payload["meta_info"], len(payload["output_ids"] or ())
        if meta.get("completion_tokens", num) != num:
            return  # SGLang can be set to stream only what is new
        place = payload.get("index")
        begin = 0 if meta.get("finish_reason") else self._num_checked.get(place, 0)
        self._num_checked[place] = check_generate(
            payload,
            wants_logprobs=self._needs_logprobs,
            begin=begin,
            vocabulary=self.vocabulary,
        )
        spans = meta.get("weight_versions")
        self._has_spans &= spans is not None
        self._versions.update(span["version"] for span in spans or ())

    @property
    def reported(self) -> Reported:
        return Reported(tuple(self._versions) if self._has_spans else None)

    def read_all(self) -> None:
        """The reply has ended: only its engine knows which of its events is the last."""
        self.finish = {"type": "end"}

    def start_over(self) -> None:
        super().start_over()
        self._has_sent = False

    @property
    def has_shown(self) -> bool:
        return self._has_sent

    def why_refused(self) -> str:
        return self.why_not if self._has_sent else ""

    def lose_engine(self) -> str:
        self._payloads, self._num_checked = [], {}
        self._versions, self._has_spans = set(), True
        return super().lose_engine()

    def payload(self) -> Payload:
        whole: Payload = self._payloads[0]
        return whole

    def new_payloads(self) -> list[Payload]:
        """The events that came since the last call."""
        new, self._payloads = self._payloads, []
        self._has_sent |= len(new) > 0
        return new
