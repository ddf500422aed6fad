"""Engines without sockets that are pushed to, paused and killed; each token says its version.

A token's id has the weight version that made it, so a client sees what a reply really has, whatever
engine and router report.  ``reports`` is how an engine reports versions: SGLang since 0.5.21 sends
``spans``, before that the version at the ``end``, and OpenAI's routes say nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.router.gate.gate import GateState
from rollout.router.http.head_cache import ReplyHead, RequestHead
from rollout.router.http.routes import route_of
from rollout.router.proxy.client_response import ClientResponse
from rollout.router.proxy.exchange import Exchange
from rollout.rules.contract import HEADERS, Contract, contract_of
from rollout.rules.routing import Backend, BackendState
from tests.rollout.router.exchange_rig import PLAIN, Client, Rig, Upstream, rig_of
from tests.rollout.router.generate_events import STREAM

PER_VERSION = 1000
NUM_ENGINES = 3


def versions_in(ids: list[int]) -> list[int]:
    return [token // PER_VERSION for token in ids]


@dataclass(eq=False)
class Live:
    """A request on an engine, with the versions of its tokens there."""

    upstream: Upstream
    versions: list[int] = field(default_factory=list)
    has_begun: bool = False

    @property
    def body(self) -> dict[str, Any]:
        return self.upstream.body

    @property
    def is_openai(self) -> bool:
        return "prompt" in self.body

    @property
    def num_each(self) -> int:
        return int((self.body.get("sampling_params") or {}).get("n", 1))

    @property
    def budget(self) -> int:
        sampling = self.body if self.is_openai else self.body["sampling_params"]
        return int(sampling["max_tokens" if self.is_openai else "max_new_tokens"])

    @property
    def num_before(self) -> int:
        return len(self.body["prompt" if self.is_openai else "input_ids"]) - 2

    @property
    def ids(self) -> list[int]:
        first = self.num_before
        return [one * PER_VERSION + first + place for place, one in enumerate(self.versions)]


@dataclass
class PushedEngine:
    port: int
    version: int = 1
    reports: str = "spans"
    is_paused: bool = False
    is_dead: bool = False
    live: list[Live] = field(default_factory=list)

    def step(self, live: Live, num: int = 1, *, finish: str = "") -> None:
        """Generate tokens, and send what a client of this engine would get."""
        if live.upstream.is_dropped:
            self.live.remove(live)
            return
        num = min(num, live.budget - len(live.versions))
        live.versions += [self.version] * num
        if not finish and len(live.versions) >= live.budget:
            finish = "length"
        is_streamed = bool(live.body.get("stream"))
        if finish:
            self.live.remove(live)
        if not is_streamed and not finish:
            return
        if is_streamed:
            found = self._event(live, finish, num)
            events = found if isinstance(found, list) else [found]
            lines = [b"data: %s\n\n" % json.dumps(event).encode() for event in events]
            data = b"".join([*lines, b"data: [DONE]\n\n" if finish else b""])
        else:
            data = json.dumps(self._event(live, finish, len(live.versions))).encode()
        if live.has_begun:
            live.upstream.more(data, is_end=bool(finish))
        else:
            live.has_begun = True
            head: ReplyHead = STREAM if is_streamed else PLAIN
            live.upstream.reply(head, data, is_end=bool(finish))

    def _event(self, live: Live, finish: str, num: int) -> Any:
        ids = live.ids
        if live.is_openai:
            new = ids[len(ids) - num :]
            choice = {"index": 0, "text": "a" * num, "token_ids": new, "logprobs": None}
            usage = {"prompt_tokens": 2, "completion_tokens": len(ids)}
            choices = [{**choice, "finish_reason": finish or None}]
            return {"id": "c", "created": 1, "model": "m", "choices": choices, "usage": usage}
        meta: dict[str, Any] = {"id": "r", "completion_tokens": len(ids)}
        meta["finish_reason"] = {"type": finish, "length": len(ids)} if finish else None
        meta["weight_version"] = str(self.version)
        if self.reports == "spans":
            spans: list[dict[str, Any]] = []
            for place, version in enumerate(live.versions):
                if spans and spans[-1]["version"] == str(version):
                    spans[-1]["end"] = place + 1
                else:
                    spans.append({"version": str(version), "start": place, "end": place + 1})
            meta["weight_versions"] = spans
            meta["weight_version"] = spans[-1]["version"] if spans else str(self.version)
        one = {"text": "a" * len(ids), "output_ids": ids, "meta_info": meta}
        if live.num_each == 1:
            return one
        return [{**one, "index": place} for place in range(live.num_each)]


@dataclass(eq=False)
class Asked:
    """A request, and what its client has got."""

    contract: Contract
    client: Client
    path: str
    is_streamed: bool
    exchange: Exchange
    timers_before: int = 0
    has_left: bool = False
    served_at_end: int | None = None

    @property
    def events(self) -> list[Any]:
        """What is in the body: events, or one reply."""
        body = self.client.data.partition(b"\r\n\r\n")[2]
        lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
        found = [json.loads(line) for line in lines]
        return found if self.is_streamed and self.client.status == 200 else [json.loads(body)]

    def ids(self) -> list[list[int]]:
        """Token ids of each completion that its client has."""
        if self.client.status != 200:
            return []
        if self.path != "/generate":
            parts = [choice.get("token_ids") or [] for event in self.events
                     for choice in event.get("choices") or ()]  # fmt: skip
            return [[token for part in parts for token in part]]
        good = [event for event in self.events if "error" not in event]
        several = [one for event in good for one in (event if isinstance(event, list) else [event])]
        return list({one.get("index"): one["output_ids"] for one in several}.values())

    @property
    def error(self) -> dict[str, Any] | None:
        """The error that it ended with."""
        last = self.events[-1] if self.events else {}
        found = last.get("error") if isinstance(last, dict) else None
        return found if isinstance(found, dict) else None


class PushedRig:
    """A router's gate and exchanges over engines that change."""

    def __init__(self, seed: int = 0, *, reports: str = "spans", num: int = NUM_ENGINES) -> None:
        self.random = random.Random(seed)
        names = [f"e{place}" for place in range(num)]
        self.rig: Rig = rig_of(*names, failover=False)
        self.served = 1
        self.rig.gate.set_state(GateState.OPEN, weight_version=1)
        self.engines = [PushedEngine(9000 + place, reports=reports) for place in range(num)]
        self.members = list(self.rig.gate.members)
        self.asked: list[Asked] = []
        self.epoch = 1
        self._num_sent = 0

    # -- clients ----------------------------------------------------------------------------

    def ask(
        self,
        *,
        path: str = "/generate",
        num: int = 4,
        stream: bool = False,
        in_body: bool = False,
        completions: int = 1,
        **contract: Any,
    ) -> Asked:
        if path == "/generate":
            sampling: dict[str, Any] = {"max_new_tokens": num}
            sampling |= {"n": completions} if completions > 1 else {}
            body: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": sampling}
        else:
            body = {"prompt": [1, 2], "max_tokens": num, "return_token_ids": True}
        headers = [(HEADERS[name].encode(), str(one).encode()) for name, one in contract.items()]
        body |= {"stream": True} if stream else {}
        body |= contract if in_body else {}
        head = RequestHead(b"POST", route_of(path.encode()), [] if in_body else headers)
        client = Client()
        exchange = Exchange(self.rig.proxy, ClientResponse(client, head), head)
        asked = Asked(contract_of(contract), client, path, stream, exchange)
        self.asked.append(asked)
        self._note_end_of(asked)
        exchange.start_whole(json.dumps(body).encode())
        self.deliver()
        return asked

    def _note_end_of(self, asked: Asked) -> None:
        finish = asked.client.finish

        def note(*, is_closing: bool) -> None:
            asked.served_at_end = self.rig.gate.weight_version
            finish(is_closing=is_closing)

        asked.client.finish = note  # type: ignore[method-assign]

    def leave(self, asked: Asked) -> None:
        if not asked.client.end:
            asked.has_left = True
            asked.exchange.client_left()
            self.deliver()

    # -- engines ----------------------------------------------------------------------------

    def deliver(self) -> None:
        """Give the engines what was sent to them since the last call."""
        sent = self.rig.engines.sent
        while self._num_sent < len(sent):
            upstream = sent[self._num_sent]
            self._num_sent += 1
            engine = self.engines[upstream.port - 9000]
            if engine.is_dead:
                upstream.lose("refused")
            else:
                engine.live.append(Live(upstream))

    def running(self) -> list[tuple[PushedEngine, Live]]:
        return [(one, live) for one in self.engines if not one.is_paused for live in one.live]

    def tokens(self, num: int = 1) -> None:
        """One request on an engine goes on, if there is one."""
        if running := self.running():
            engine, live = self.random.choice(running)
            engine.step(live, num)
            self.deliver()

    def run_all(self) -> None:
        """All requests on engines that are not paused end."""
        while running := self.running():
            engine, live = running[0]
            engine.step(live, 8)
            self.deliver()

    def kill(self, place: int) -> None:
        engine = self.engines[place]
        engine.is_dead, live = True, engine.live
        engine.live = []
        for lost in live:
            if not lost.upstream.is_dropped:
                lost.upstream.lose()
        self.deliver()
        self.publish()

    def revive(self, place: int) -> None:
        """It is started again, with the weights that engines serve."""
        self.engines[place].is_dead = self.engines[place].is_paused = False
        self.engines[place].version = self.served
        self.publish()

    def publish(self) -> None:
        self.epoch += 1
        states = [
            BackendState.FENCED if one.is_dead else BackendState.SERVING for one in self.engines
        ]
        members = [
            Backend(one.engine_id, one.endpoint, state)
            for one, state in zip(self.members, states, strict=True)
        ]
        self.rig.gate.set_members(self.epoch, members)
        self.deliver()

    # -- a push, in its steps ---------------------------------------------------------------

    def hold(self) -> None:
        self.rig.gate.set_state(GateState.HOLDING, reason="a push")

    def pause(self, drain: str) -> None:
        if drain == "finish":
            self.run_all()
        for engine in self.engines:
            for live in list(engine.live) if drain == "abort" else ():
                engine.step(live, 0, finish="abort")
            engine.is_paused = True
        self.deliver()

    def write(self, num: int = 1) -> None:
        """The engines have newer weights, by so many versions."""
        self.served += num
        for engine in self.engines:
            engine.version = self.served

    def go_on(self) -> None:
        for engine in self.engines:
            engine.is_paused = False

    def open(self) -> None:
        self.rig.gate.set_state(GateState.OPEN, weight_version=self.served)
        self.deliver()

    def push(
        self, drain: str = "abort", num: int = 1, between: Callable[[], None] = lambda: None
    ) -> None:
        """A whole push; ``between`` is called before the gate opens, when engines go on."""
        self.hold()
        self.pause(drain)
        self.write(num)
        self.go_on()
        between()
        self.open()

    def time_out(self) -> None:
        """The time of what waits comes."""
        for timer in list(self.rig.timers):
            timer.pass_()
        self.deliver()


def why_broken(asked: Asked) -> str:
    """Why what a client has got does not fulfil its contract; empty if it does.

    How far tokens lag is judged of a reply that is complete, not of the part before an error.
    """
    contract = (
        asked.contract if asked.error is None else replace(asked.contract, max_version_lag=None)
    )
    for ids in asked.ids():
        if versions := versions_in(ids):
            oldest, newest = min(versions), max(versions)
            served = asked.served_at_end
            if why := contract.why_broken(oldest, newest, served):
                return f"{why}: tokens {versions} of {asked.path}"
    return ""
