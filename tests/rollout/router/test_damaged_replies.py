"""Every damage of a reply's tokens x every reader: an error that names the engine, no tokens.

An engine answers three tokens, of which something is wrong.  The rule is ``reply_check``; where the
router passes bytes on unread, the client library reads them.  By default every tenth case runs.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engines.protocol import SamplingParams
from rollout.config import AgentsConfig, RouterConfig
from rollout.core.errors import GenerationFailed, RolloutError
from rollout.driver.client.retry import RetryPolicy
from rollout.driver.client.sample_requests import make_requests
from rollout.driver.data.prompt import Prompt
from rollout.driver.driver import RolloutDriver
from rollout.runtime.calls.sample_client import SampleClient
from tests.rollout.router.conftest import Bench, ClientReply, MakeBench, router_config
from tests.rollout.router.stub_engine import STREAM, Connection, Seen, chunk, reply
from tests.support.agent_workers import worker_of_router
from tests.support.chat_models import write_chat_model

pytestmark = pytest.mark.timeout(120)

PROMPT = [1, 2]
IDS = [5, 6, 7]
VOCABULARY = 300
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
ON = {"x-token-failover": "on"}


@dataclass
class Answer:
    """What an engine answers, in no form so far."""

    ids: list[Any] = field(default_factory=lambda: [*IDS])
    logprobs: list[Any] = field(default_factory=lambda: [-0.5, 0.0, -1e-7])
    named: list[Any] = field(default_factory=lambda: [*IDS])
    meta: dict[str, Any] = field(default_factory=lambda: {"weight_version": "7"})
    num_prompt: int = len(PROMPT)
    more_rows: int = 0

    def up_to(self, num: int) -> Answer:
        part = copy.deepcopy(self)
        part.ids, part.logprobs, part.named = self.ids[:num], self.logprobs[:num], self.named[:num]
        return part


def without_first(answer: Answer) -> None:
    del answer.logprobs[0], answer.named[0]


def without_last(answer: Answer) -> None:
    del answer.logprobs[-1], answer.named[-1]


def with_another(answer: Answer) -> None:
    answer.logprobs.append(-1.0)
    answer.named.append(8)


def without_any(answer: Answer) -> None:
    answer.logprobs, answer.named = [], []


def without_id(answer: Answer) -> None:
    del answer.ids[-1]


def with_logprob(value: Any) -> Callable[[Answer], None]:
    return lambda answer: answer.logprobs.__setitem__(-1, value)


def with_id(value: Any) -> Callable[[Answer], None]:
    def change(answer: Answer) -> None:
        answer.ids[-1] = answer.named[-1] = value

    return change


def with_meta(**fields: Any) -> Callable[[Answer], None]:
    return lambda answer: answer.meta.update(fields)


def without_version(answer: Answer) -> None:
    del answer.meta["weight_version"]


def spans(*ends: int, begin: int = 0, version: Any = "7") -> dict[str, Any]:
    starts = (begin, *ends)
    made = [
        {"version": version, "start": start, "end": end}
        for start, end in zip(starts, ends, strict=False)
    ]
    return {"weight_versions": made}


def with_rows(change: int) -> Callable[[Answer], None]:
    return lambda answer: setattr(answer, "more_rows", change)


EVERYWHERE: dict[str, Callable[[Answer], None]] = {
    "first log-prob missing": without_first,
    "last log-prob missing": without_last,
    "no log-prob": without_any,
    "a log-prob too many": with_another,
    "id missing": without_id,
    "+3.0": with_logprob(3.0),
    "+0.01": with_logprob(0.01),
    "NaN": with_logprob(float("nan")),
    "-inf": with_logprob(float("-inf")),
    "null": with_logprob(None),
    "-9999": with_logprob(-9999.0),
    "text": with_logprob("-0.5"),
    "negative id": with_id(-1),
    "id of 40 bits": with_id(1 << 40),
    "id is a text": with_id("5"),
    "id is a float": with_id(5.5),
}
READ_BY_ROUTER: dict[str, Callable[[Answer], None]] = {
    "id outside the vocabulary": with_id(VOCABULARY)
}
OF_GENERATE: dict[str, Callable[[Answer], None]] = {
    "id of another pair": lambda answer: answer.named.__setitem__(1, 9),
    "no version": without_version,
    "version null": with_meta(weight_version=None),
    "version empty": with_meta(weight_version=""),
    "versions are a text": with_meta(weight_versions="77"),
    "version of a span missing": with_meta(**spans(3, version=None)),
    "versions from token 1": with_meta(**spans(3, begin=1)),
    "versions overlap": with_meta(weight_versions=spans(2)["weight_versions"] * 2),
    "bounds are texts": with_meta(weight_versions=[{"version": "7", "start": "0", "end": "3"}]),
    "a row of experts missing": with_rows(-1),
    "a row of experts too many": with_rows(1),
    "experts are a number": with_meta(routed_experts=7),
}


# -- the engine -------------------------------------------------------------------------------


def of_generate(answer: Answer, *, is_last: bool) -> dict[str, Any]:
    num = len(answer.ids)
    num_rows = answer.num_prompt + num - 1 + answer.more_rows
    experts = base64.b64encode(b"experts" * num_rows).decode()
    meta = {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 2} if is_last else None,
        "prompt_tokens": answer.num_prompt,
        "completion_tokens": num,
        "output_token_logprobs": [
            [value, token, None] for value, token in zip(answer.logprobs, answer.named, strict=True)
        ],
    }
    meta |= {"routed_experts": experts} | answer.meta
    return {"text": "a" * num, "output_ids": answer.ids, "meta_info": meta}


def of_openai(answer: Answer, before: int, *, is_chat: bool, is_last: bool) -> dict[str, Any]:
    """What is new of an answer, or all of it."""
    ids, values = answer.ids[before:], answer.logprobs[before:]
    text = "a" * len(ids)
    columns: dict[str, Any] = {"token_logprobs": values, "tokens": ["a"] * len(values)}
    if is_chat:
        columns = {"content": [{"token": "a", "logprob": value} for value in values]}
    choice = {"index": 0, "token_ids": ids, "logprobs": columns}
    choice["finish_reason"] = "stop" if is_last else None
    choice |= {"delta": {"content": text}} if is_chat else {"text": text}
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(answer.ids)}
    return {"id": "r", "created": 1, "model": "m", "choices": [choice], "usage": usage}


@dataclass
class Engine:
    """Answers each route in its form.

    Attributes:
        damage: of each answer.
        place: of the damage in a stream: with the last event, or the first of two.
    """

    damage: Callable[[Answer], None] | None = None
    place: str = "last"

    async def __call__(self, connection: Connection, seen: Seen) -> None:
        right = Answer(num_prompt=len(seen.json.get("input_ids") or PROMPT))
        first, last = right.up_to(2), right.up_to(3)
        if self.damage is not None:
            self.damage(last if self.place == "last" else first)
        path = seen.target.partition("?")[0]
        if path == GENERATE:
            events = [of_generate(first, is_last=False), of_generate(last, is_last=True)]
        else:
            is_chat = path == CHAT
            events = [
                of_openai(first, 0, is_chat=is_chat, is_last=False),
                of_openai(last, 2, is_chat=is_chat, is_last=True),
            ]
        if not seen.json.get("stream"):
            body = json.dumps(events[-1]).encode()
            await reply(body, headers=("Content-Type: application/json",))(connection, seen)
            return
        await connection.send(STREAM)
        for event in events:
            await connection.send(chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
        await connection.send(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")


# -- who reads --------------------------------------------------------------------------------


class NoReply(Exception):
    """The reader has refused the reply, with this text."""


@dataclass
class World:
    """A router over one engine.

    Attributes:
        agents: a client of a worker of agents.
        sampling: of a client library.
    """

    bench: Bench
    engine: Engine
    client: SampleClient
    agents: aiohttp.ClientSession
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=3))
    num_turns: int = 0

    def options(self) -> dict[str, Any]:
        return {"routed_experts": True, "lora_path": ""}

    async def post(self, path: str, body: dict[str, Any], *, is_streamed: bool = False) -> Any:
        """The reply; raises what the router says of it."""
        body = {**body, "stream": is_streamed}
        client = self.agents if path.startswith("/sessions") else self.bench.client
        async with client.post(path, json=body, headers=ON) as response:
            got = ClientReply(response.status, response.headers, await response.read())
        if got.status != 200:
            assert got.status == 502, got.body
            raise NoReply(got.body.decode())
        if not is_streamed:
            return got.json
        lines = got.body.decode().split("\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        if "error" in events[-1]:
            raise NoReply(json.dumps(events[-1]))
        return events


async def generate(world: World) -> Any:
    (request,) = make_requests(PROMPT, world.sampling, "", **world.options())
    pending = world.client.generate([request], "")
    try:
        (got,) = await asyncio.to_thread(pending.result, 30)
    except GenerationFailed as error:
        raise NoReply(str(error)) from error
    return got.output_ids, got.output_logprobs


async def stream(world: World) -> Any:
    (request,) = make_requests(PROMPT, world.sampling, "", **world.options())
    shown: list[Any] = []

    def read() -> None:
        parts = world.client.stream(request, "")
        shown.extend((part.output_ids, part.output_logprobs) for part in parts)

    try:
        await asyncio.to_thread(read)
    except GenerationFailed as error:
        right = Answer()
        for ids, logprobs in shown:
            assert (ids, logprobs) == (tuple(right.ids[:2]), tuple(right.logprobs[:2]))
        raise NoReply(str(error)) from error
    return shown[-1]


async def drive(world: World) -> Any:
    async with RolloutDriver(
        world.bench.url, retry_policy=RetryPolicy(max_lost=0), routed_experts=True
    ) as driver:
        try:
            ((sample,),) = await driver.rollout(
                1, [Prompt(tuple(PROMPT))], group_size=1, sampling=world.sampling
            )
        except RolloutError as error:
            raise NoReply(str(error)) from error
    return sample.output_ids, sample.output_logprobs


def whole_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice of a stream, however many events came together."""
    text, logprobs, others = "", list[Any](), dict[str, Any]()
    for choice in (choice for event in events for choice in event["choices"]):
        members = choice["delta"] | choice
        text += members.pop("content", None) or ""
        logprobs += (members.pop("logprobs", None) or {}).get("content") or []
        del members["delta"]
        others |= {name: value for name, value in members.items() if value is not None}
    return others | {"content": text, "logprobs": logprobs}


async def turn(world: World, *, is_streamed: bool) -> Any:
    world.num_turns += 1
    path = f"/sessions/s-{world.num_turns}{CHAT}"
    body = {"messages": [{"role": "user", "content": "q"}], "logprobs": True}
    try:
        got = await world.post(path, body, is_streamed=is_streamed)
        return whole_of(got) if is_streamed else got["choices"]
    except NoReply:
        async with world.agents.get(f"/sessions/s-{world.num_turns}") as kept:
            assert kept.status == 404 or (await kept.json())["turns"] == []
        raise


def raw_body(world: World) -> dict[str, Any]:
    sampling = {"max_new_tokens": 3}
    body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling}
    return body | {"return_routed_experts": True}


def of_openai_client(path: str, *, is_streamed: bool) -> Callable[[World], Awaitable[Any]]:
    async def read(world: World) -> Any:
        about: dict[str, Any] = {"prompt": PROMPT, "logprobs": 1}
        if path == CHAT:
            about = {"messages": [{"role": "user", "content": "q"}], "logprobs": True}
        return await world.post(path, {**about, "max_tokens": 3}, is_streamed=is_streamed)

    return read


@dataclass(frozen=True)
class Reader:
    """Who reads a reply.

    Attributes:
        read: what it makes of the reply; raises ``NoReply``.
        modes: of token failover in which it is read at all.
        is_of_generate: the engine's reply is one of ``/generate``.
        kind: of the engine.
    """

    read: Callable[[World], Awaitable[Any]]
    modes: tuple[str, ...] = ("on", "off")
    is_of_generate: bool = True
    kind: str = "sglang"


READERS: dict[str, Reader] = {
    "policy.generate": Reader(generate),
    "policy.stream": Reader(stream),
    "driver": Reader(drive),
    "session": Reader(lambda world: turn(world, is_streamed=False)),
    "session, streamed": Reader(lambda world: turn(world, is_streamed=True)),
    "/generate": Reader(lambda world: world.post(GENERATE, raw_body(world)), ("on",)),
    "/generate, streamed": Reader(
        lambda world: world.post(GENERATE, raw_body(world), is_streamed=True), ("on",)
    ),
}
for _path in (COMPLETIONS, CHAT):
    for _is_streamed in (False, True):
        READERS[_path + ", streamed" * _is_streamed] = Reader(
            of_openai_client(_path, is_streamed=_is_streamed),
            ("on",),
            is_of_generate=False,
            kind="vllm" if _path == CHAT else "sglang",
        )


def cases(name: str, mode: str) -> Iterator[tuple[str, str, Callable[[Answer], None]]]:
    """The damages that this reader can meet, and where in a stream."""
    reader = READERS[name]
    damages = {**EVERYWHERE, **(READ_BY_ROUTER if mode == "on" else {})}
    if reader.is_of_generate:
        damages |= OF_GENERATE
    for what, damage in damages.items():
        for place in ("last", "first"):
            yield what, place, damage


@asynccontextmanager
async def world_of(make_bench: MakeBench, folder: Path, mode: str) -> AsyncIterator[World]:
    engine = Engine()
    write_chat_model(folder)
    config = router_config(token_failover=mode, tokenizer_path=str(folder))
    bench = await make_bench(engine, config=config)

    async def find_url() -> str:
        return bench.url

    agents = AgentsConfig(tokenizer_path=str(folder))
    async with (
        worker_of_router(bench.url, folder / "agents", agents) as url,
        aiohttp.ClientSession(url) as client,
    ):
        yield World(bench, engine, SampleClient(find_url, RouterConfig()), client)


async def check(world: World, name: str, mode: str, share: int) -> list[str]:
    """What is wrong with the reader, of every so many cases."""
    reader, found, engine = READERS[name], [], world.engine
    member = world.bench.member(0, kind=reader.kind, vocabulary=VOCABULARY)
    await world.bench.host.set_members(2, [member])
    right = await reader.read(world)
    assert right
    for number, (what, place, damage) in enumerate(cases(name, mode)):
        if (number + len(name) + len(mode)) % share:  # not the same ones of each
            continue
        where = f"{name}, failover {mode}: {what}, in the {place} event"
        engine.damage, engine.place = damage, place
        # An engine that computes NaN has left.
        await world.bench.host.set_members(3 + number, [member])
        before = await world.bench.host.stats()
        try:
            got = await reader.read(world)
        except NoReply as refusal:
            if "e-0" not in str(refusal):
                found.append(f"{where}: the engine is not named: {refusal}")
        except Exception as error:
            found.append(f"{where}: {error!r}")
        else:
            # A damage of an event that is followed by a right one of all tokens is no damage to
            # a reader of the last one.
            if got != right or place == "last":
                found.append(f"{where}: delivered {got}")
            continue
        stats = await world.bench.host.stats()
        names = ("num_unusable_replies", "num_engine_failures")
        if mode == "on" and not any(stats[one] > before[one] for one in names):
            found.append(f"{where}: not counted")
    engine.damage = None
    await world.bench.host.set_members(1 << 20, [member])
    if await reader.read(world) is None:
        found.append(f"{name}, failover {mode}: nothing right afterwards")
    return found


PAIRS = [(name, mode) for name, reader in READERS.items() for mode in reader.modes]


@pytest.mark.parametrize(("name", "mode"), PAIRS)
async def test_a_damaged_reply_is_refused_by_every_reader(
    name: str, mode: str, make_bench: MakeBench, tmp_path: Path
) -> None:
    async with world_of(make_bench, tmp_path, mode) as world:
        assert await check(world, name, mode, 10) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), PAIRS)
async def test_each_damaged_reply_is_refused_by_every_reader(
    name: str, mode: str, make_bench: MakeBench, tmp_path: Path
) -> None:
    async with world_of(make_bench, tmp_path, mode) as world:
        assert await check(world, name, mode, 1) == []


async def test_what_the_router_does_not_read_it_passes_on_as_it_came(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    """Without token failover: there a client of its own has to check."""
    async with world_of(make_bench, tmp_path, "off") as world:
        world.engine.damage = with_logprob(3.0)
        got = await world.post(GENERATE, raw_body(world))
        assert got["meta_info"]["output_token_logprobs"][-1][0] == 3.0
        assert (await world.bench.host.stats())["num_unusable_replies"] == 0
