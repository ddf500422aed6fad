"""Exchanges without sockets: a gate, engines that keep what they are sent, and clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engines.protocol import Endpoint
from rollout.config import RouterConfig
from rollout.router.gate.gate import Gate, GateState
from rollout.router.http.fast_json import Data
from rollout.router.http.head_cache import ReplyHead, RequestHead
from rollout.router.http.routes import route_of
from rollout.router.proxy.client_response import ClientResponse
from rollout.router.proxy.context import Proxy
from rollout.router.proxy.exchange import Exchange
from rollout.rules.routing import Backend

PLAIN = ReplyHead(200, [(b"content-type", b"application/json")])
ASK = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}


@dataclass(eq=False)
class Upstream:
    """A request on its connection to an engine."""

    handler: Any
    port: int
    body: dict[str, Any]
    is_dropped: bool = False
    is_paused: bool = False

    @property
    def id(self) -> str:
        """The request's id at the engine."""
        return str(self.body["rid"])

    def drop(self) -> None:
        self.is_dropped = True

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def reply(self, head: ReplyHead, data: bytes, *, is_end: bool = True) -> None:
        self.handler.on_reply(head, b"%d" % len(data), b"", False)
        self.more(data, is_end=is_end)

    def more(self, data: bytes, *, is_end: bool = False) -> None:
        if is_end:
            self.handler.upstream = None
        self.handler.on_reply_data(data, is_end)

    def lose(self, why: str = "reset") -> None:
        self.handler.upstream = None
        self.handler.on_engine_lost(why)


@dataclass
class Engines:
    """Takes the place of the pool: it keeps what is sent."""

    sent: list[Upstream] = field(default_factory=list)
    fails: bool = False

    def send(
        self, handler: Any, endpoint: Endpoint, parts: list[bytes], *, is_head: bool = False
    ) -> None:
        if self.fails:
            raise RuntimeError("injected")
        body = json.loads(b"".join(parts).partition(b"\r\n\r\n")[2])
        self.sent.append(Upstream(handler, endpoint.port, body))
        handler.upstream = self.sent[-1]


@dataclass
class Client:
    """Takes the place of the client's connection."""

    is_write_paused: bool = False
    data: bytes = b""
    end: str = ""

    def write(self, *parts: Data) -> None:
        self.data += b"".join(parts)

    def finish(self, *, is_closing: bool) -> None:
        assert not self.end
        self.end = "finished"

    def cut(self, *, is_flushed: bool) -> None:
        self.end = "cut"

    def finish_unread(self) -> None:
        self.end = "unread"

    @property
    def status(self) -> int:
        return int(self.data.split(b" ", 2)[1])


@dataclass
class Timer:
    work: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def pass_(self) -> None:
        """Its time comes, unless it was cancelled."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.work()


@dataclass
class Rig:
    gate: Gate
    engines: Engines
    proxy: Proxy
    timers: list[Timer] = field(default_factory=list)

    def begin(self, *headers: tuple[bytes, bytes], **more: Any) -> tuple[Exchange, Client]:
        client = Client()
        head = RequestHead(b"POST", route_of(b"/generate"), list(headers))
        exchange = Exchange(self.proxy, ClientResponse(client, head), head)
        exchange.start_whole(json.dumps(ASK | more).encode())
        return exchange, client

    def is_empty(self) -> bool:
        timers = all(timer.is_cancelled for timer in self.timers)
        return not (len(self.gate.in_flight) or self.gate.num_held or self.proxy.live) and timers


def rig_of(*engine_ids: str, failover: bool = True, **fields: Any) -> Rig:
    gate, engines = Gate(), Engines()
    members = [
        Backend(name, Endpoint("h", 9000 + place), **fields)
        for place, name in enumerate(engine_ids)
    ]
    gate.set_members(1, members)
    gate.set_state(GateState.OPEN, weight_version=7)
    config = RouterConfig(token_failover="on" if failover else "off")
    proxy = Proxy(gate, engines, config, "run")  # type: ignore[arg-type]
    rig = Rig(gate, engines, proxy)

    def call_later(delay_s: float, work: Callable[..., None], *arguments: Any) -> Timer:
        rig.timers.append(Timer(partial(work, *arguments)))
        return rig.timers[-1]

    proxy.call_later = call_later  # type: ignore[assignment]
    return rig
