"""The reply to a turn of a session: ``/generate`` as an exchange within this process.

The router's gate holds the request and its failover continues it, as for any client; replies come
as objects.  Each has all tokens so far, so only the newest is kept for a client that reads slowly,
and of the tokens before its last ones nothing is read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engines.http.sglang_json import read_generate, read_logprob
from rollout.agents.failures import ChatFailure, failure
from rollout.agents.plan import Ended
from rollout.agents.turns.store import Session
from rollout.router.continuation.core import UNUSABLE, Payload
from rollout.router.continuation.fast_path import loads_reply
from rollout.router.continuation.reply import Reply
from rollout.router.http import responses
from rollout.router.http.fast_json import dumps
from rollout.router.http.head_cache import RequestHead
from rollout.router.http.responses import RouterResponse
from rollout.router.http.routes import GENERATE_PATH, route_of
from rollout.router.proxy.context import Proxy
from rollout.router.proxy.exchange import Exchange
from rollout.router.proxy.token_reader import why_unusable
from rollout.rules.contract import NO_CONTRACT, Contract

_MOST_AT_ONCE = 1 << 13
"""Tokens, or bytes, that are read on the event loop: it takes 1 ms."""
_ROUTE = route_of(GENERATE_PATH.encode())
_HEADERS = [(b"content-type", b"application/json"), (b"x-token-failover", b"on")]


@dataclass(frozen=True, slots=True)
class Progress:
    """The tokens of a turn so far.

    Attributes:
        entries: of their log-probs, as the engine writes them.
        signed: lines of a head that name the engine and its weights.
    """

    text: str
    ids: Sequence[int]
    entries: Sequence[Any]
    signed: bytes = b""

    def logprobs_from(self, num: int) -> list[float]:
        """Those of the tokens from this one on."""
        return [read_logprob(entry[0]) for entry in self.entries[num:]]


@dataclass(frozen=True, slots=True)
class _Unread:
    """A complete reply; to read 64 k tokens takes 5 ms.

    Attributes:
        size: its tokens, or its bytes.
        read_now: reads it.  Raises as ``UNUSABLE`` has.
        signed: lines of a head that name the engine and its weights.
    """

    size: int
    read_now: Callable[[], Ended]
    signed: bytes = b""

    async def read(self) -> Ended:
        """The reply; a long one is read in a thread."""
        if self.size > _MOST_AT_ONCE:
            ended = await asyncio.to_thread(self.read_now)
        else:
            ended = self.read_now()
        return replace(ended, signed=self.signed)


def _read(payload: Payload) -> Ended:
    reply = read_generate(payload)
    is_known = payload["meta_info"].get("cached_tokens") is not None
    return Ended(reply, num_cached=reply.cached_tokens if is_known else None)


async def generate(
    proxy: Proxy,
    affinity: str,
    body: bytes,
    session: Session | None = None,
    contract: Contract = NO_CONTRACT,
) -> AsyncGenerator[Progress | Ended, None]:
    """The tokens so far, at last the end.  When it is closed, the request ends.

    Args:
        affinity: of the session, whose turns prefer one engine.
        body: as ``/generate`` takes it.
        session: stays with the weights of its first turn; None moves to what is published.
        contract: what its tokens have to fulfil.

    Raises:
        ChatFailure: there is no complete reply.
    """
    wanted = [(name.encode(), text.encode()) for name, text in contract.to_headers().items()]
    headers = [*_HEADERS, (b"x-affinity", affinity.encode()), *wanted]
    head = RequestHead(b"POST", _ROUTE, headers)
    response = _TurnResponse()
    exchange = Exchange(proxy, response, head, session=session)
    exchange.start_whole(body)
    del body
    reply: Progress | Ended | None = None
    try:
        while True:
            await response.has_news.wait()
            if (newest := response.take()) is not None:
                try:
                    reply = await newest.read() if isinstance(newest, _Unread) else newest
                except UNUSABLE as error:
                    unusable = exchange.unusable(why_unusable(error))
                    raise ChatFailure(502, dumps(unusable.payload)) from error
                yield reply
            elif response.failure is not None:
                raise response.failure
            elif response.is_over:
                break
    finally:
        exchange.client_left()
    if not isinstance(reply, Ended):
        raise failure(502, "engine_failure", "the reply ended before its last token")


class _AsObjects:
    """Replies as a turn takes them; an error event is the turn's failure."""

    def events(
        self, payloads: list[Payload], *, is_end: bool
    ) -> Progress | _Unread | ChatFailure | None:
        if not payloads:
            return None
        last = payloads[-1]
        if "error" in last:
            return ChatFailure(502, dumps({"error": last["error"]}))
        meta, ids = last["meta_info"], last.get("output_ids") or ()
        if meta.get("finish_reason") is not None:
            return _Unread(len(ids), partial(_read, last))
        return Progress(last.get("text") or "", ids, meta.get("output_token_logprobs") or ())

    def whole(self, reply: Reply) -> list[_Unread]:
        parts = reply.passed_on
        if parts is not None:
            return [_Unread(sum(map(len, parts)), lambda: _read(loads_reply(b"".join(parts))))]
        payload = reply.payload()
        return [_Unread(len(payload.get("output_ids") or ()), partial(_read, payload))]


class _TurnResponse:
    """A response as the turn waits for it.

    Attributes:
        has_news: there is something to take, or its end.
        failure: how it ended without a complete reply.
    """

    form = _AsObjects()
    is_write_paused = False

    def __init__(self) -> None:
        self.has_news = asyncio.Event()
        self.has_begun = False
        self.is_over = False
        self.failure: ChatFailure | None = None
        self._newest: Progress | _Unread | None = None

    def take(self) -> Progress | _Unread | None:
        """The newest reply, if it was not taken."""
        newest, self._newest = self._newest, None
        if not self.is_over:
            self.has_news.clear()
        return newest

    def send_whole(
        self, status: int, content_type: bytes, body: Sequence[Any], signed: bytes
    ) -> None:
        if isinstance(body[0], _Unread):
            self.send_events(body[0], signed)
        elif status != 200:
            self.failure = ChatFailure(status, b"".join(body))
        else:
            why = f"a reply cannot be used: {bytes(body[0])[:200]!r}"
            self.failure = failure(502, "engine_failure", why)

    def send_events(
        self,
        events: Progress | _Unread | ChatFailure | None,
        signed: bytes,
        *,
        is_end: bool = False,
    ) -> None:
        if isinstance(events, ChatFailure):
            self.failure = events
        elif events is not None:
            self._newest = replace(events, signed=signed)
            self.has_begun = True
            self.has_news.set()

    def finish(self) -> None:
        self.is_over = True
        self.has_news.set()

    def send(self, response: RouterResponse, *, is_unread: bool) -> None:
        after = next((value for name, value in response.headers if name == b"retry-after"), b"")
        self._fail(response.status, response, after.decode())

    def break_off(self, response: RouterResponse) -> None:
        self._fail(502, response)

    def cut(self, *, is_now: bool = False) -> None:
        self.break_off(responses.error(502, "engine_failure", "the reply was cut off"))

    def _fail(self, status: int, response: RouterResponse, retry_after: str = "") -> None:
        self.failure = ChatFailure(status, dumps(response.payload), retry_after)
        self.finish()
