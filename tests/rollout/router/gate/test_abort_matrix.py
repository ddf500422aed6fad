"""An abort at each moment of a request's life: it ends what it names, and what it names alone.

Always true, whatever the engine does with its call: who is named ends within half a second as
aborted, with the tokens so far; the router holds for final what it has named to engines, and no
other; all others have all of their tokens, also over a pause that follows.

Router, fakes and clients speak over sockets of one event loop, in virtual time.  An eleventh is in
the default suite, the rest is slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import aiohttp
import pytest
import uvicorn

from engines.fake import FakeEngine
from engines.fake.http_fake import HttpFakeLauncher, ServedFake
from engines.http.uvicorn_server import HttpServer
from engines.launch import EngineSpec
from engines.protocol import Endpoint, GenerateReply, PauseMode, SamplingParams
from engines.protocol.errors import EngineRejected
from rollout.config import RouterConfig
from rollout.core.samples import Sample, SampleStatus
from rollout.driver.client.completer import AbortScope, Completer
from rollout.driver.client.generation_client import (
    FailureKind,
    GenerationError,
    GenerationRequest,
)
from rollout.driver.client.http_client import HttpGenerationClient
from rollout.driver.client.limiter import Limiter
from rollout.driver.client.retry import RetryPolicy
from rollout.router import Backend
from rollout.router.control_api import control_app
from rollout.router.gate.gate import Gate, GateState
from rollout.router.http.engine_pool import EnginePool
from rollout.router.proxy.client_connection import ClientConnection
from rollout.router.proxy.context import Proxy
from rollout.router.proxy.exchange import Exchange
from rollout.router.proxy.stages import OnEngine
from tests.support.virtual_time import pass_time, virtual_time

TOKEN_S = 0.1
NUM_TOKENS = 40
SAMPLING = SamplingParams(max_new_tokens=NUM_TOKENS)
WITHIN_S = 0.5
ANSWERED_WITHIN_S = 1.1
"""The order itself, where an engine does not."""
RIDS = ("r-1", "r-10", "r-1/a", "r", "s-1")
ORDERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "id": ({"rid": "r-1"}, {"r-1"}),
    "list": ({"rid": ["r-1", "s-1"]}, {"r-1", "s-1"}),
    "key": ({"rid_prefix": "r-1/"}, {"r-1/a"}),
    "unknown": ({"rid": ["r-", "r-100", "r-1/"]}, set()),
    "neighbour": ({"rid": "r-10"}, {"r-10"}),
}
"""Target -> the order, and who is named."""


@dataclass
class Ended:
    """How a request ended for its reader."""

    at_s: float
    ids: tuple[int, ...]
    kind: str


@dataclass
class World:
    """A router over two fakes."""

    proxy: Proxy
    url: str
    fakes: dict[str, ServedFake]
    client: HttpGenerationClient
    readers: dict[str, asyncio.Task[Ended]] = field(default_factory=dict)
    scopes: dict[str, AbortScope] = field(default_factory=dict)
    epoch: int = 0

    @property
    def gate(self) -> Gate:
        return self.proxy.gate

    @property
    def engines(self) -> list[FakeEngine]:
        return [fake.engine for fake in self.fakes.values()]

    def serve(self, *names: str) -> None:
        self.epoch += 1
        found = {name: self.fakes[name] for name in names or self.fakes}
        self.gate.set_members(
            self.epoch,
            [Backend(name, fake.endpoint, access=fake.access) for name, fake in found.items()],
        )

    async def order(self, body: dict[str, Any]) -> dict[str, Any]:
        """The router's reply to an abort."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/abort_request", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            found: dict[str, Any] = await response.json()
            return found

    def final(self) -> set[str]:
        """The ids of what the router sends to no further engine."""
        stages = [live.stage for live in self.proxy.live if isinstance(live, Exchange)]
        return {
            stage.admission.rid
            for stage in stages
            if isinstance(stage, OnEngine) and stage.is_aborted
        }

    def ordered(self) -> set[str]:
        """The ids that engines have got calls to abort for, as engines know them."""
        calls = [call for engine in self.engines for call in engine.calls]
        return {str(call.arguments["rid"]) for call in calls if call.operation == "abort_request"}

    async def pause(self) -> None:
        self.gate.set_state(GateState.HOLDING)
        for engine in self.engines:
            if not engine.is_dead:
                await engine.pause_generation(PauseMode.ABORT)
        await pass_time(0.05)

    async def resume(self) -> None:
        for engine in self.engines:
            if not engine.is_dead:
                await engine.continue_generation()
        self.gate.set_state(GateState.OPEN, weight_version=8)


def make(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return FakeEngine(spec.engine_id, endpoint=endpoint, token_s=TOKEN_S)


@asynccontextmanager
async def world_of(*names: str) -> AsyncIterator[World]:
    """Those of the fakes e0 and e1 are serving."""
    async with AsyncExitStack() as stack:
        fakes = {}
        for name in ("e0", "e1"):
            fakes[name] = await HttpFakeLauncher(make).launch(EngineSpec(name, "fake", "/m", ""))
            stack.push_async_callback(fakes[name].kill)
        config = RouterConfig(connect_timeout_s=1.0)
        pool = EnginePool(connect_timeout_s=1.0, max_connections=64)
        proxy = Proxy(Gate(), pool, config, "run")
        proxy.decode = lambda ids: " ".join(map(str, ids))
        server = HttpServer(
            uvicorn.Config(
                control_app(proxy, connect_timeout_s=1.0),
                host="127.0.0.1",
                port=0,
                http=partial(ClientConnection, proxy),  # type: ignore[arg-type]
                ws="none",
                lifespan="on",
                log_config=None,
                date_header=False,
            )
        )
        listens = asyncio.Event()
        server.on_started = listens.set
        serving = asyncio.create_task(server.serve())
        await listens.wait()
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        client = HttpGenerationClient(url, timeout_s=100.0)
        world = World(proxy, url, fakes, client)
        world.serve(*names)
        proxy.gate.set_state(GateState.OPEN, weight_version=7)
        try:
            yield world
        finally:
            for reading in world.readers.values():
                reading.cancel()
            await client.close()
            server.stop(1.0)
            await serving


# -- readers --------------------------------------------------------------------------------


def request_of(rid: str) -> GenerationRequest:
    return GenerationRequest(rid, [RIDS.index(rid) + 1], SAMPLING, fails_over=True)


def beginning(rid: str) -> tuple[int, ...]:
    """The tokens of a request from its first engine, which are its own."""
    first = RIDS.index(rid) + 1
    return tuple(first + 7 * place for place in range(5))


def ended(reply: GenerateReply | None, kind: str = "") -> Ended:
    ids = () if reply is None else reply.output_ids
    reason = reply.finish_reason if reply is not None else None
    return Ended(asyncio.get_running_loop().time(), ids, kind or (reason.kind if reason else ""))


async def generate(world: World, rid: str) -> Ended:
    try:
        return ended(await world.client.generate(request_of(rid)))
    except GenerationError as error:
        return ended(None, "abort" if error.kind is FailureKind.ABORTED else repr(error))


async def stream(world: World, rid: str) -> Ended:
    last = None
    try:
        async for reply in world.client.stream(request_of(rid)):
            last = reply
    except GenerationError as error:
        return ended(last, "abort" if error.kind is FailureKind.ABORTED else repr(error))
    return ended(last)


class Named:
    """``client`` for one request, which has the id that the matrix gives it."""

    def __init__(self, client: HttpGenerationClient, rid: str) -> None:
        self._client = client
        self._rid = rid
        self.num_sent = 0

    async def generate(self, request: GenerationRequest) -> GenerateReply:
        self.num_sent += 1
        return await self._client.generate(replace(request, rid=self._rid, fails_over=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


async def driver(world: World, rid: str) -> Ended:
    """A sample of a driver, which stops its scope before it aborts what is in it."""
    named, clock = Named(world.client, rid), asyncio.get_running_loop().time
    completer = Completer(named, Limiter(1, clock=clock), RetryPolicy())
    sample = Sample([RIDS.index(rid) + 1])
    world.scopes[rid] = scope = AbortScope()
    await completer.complete(sample, SAMPLING, scope=scope)
    assert named.num_sent == 1, "a sample was sent again"
    is_aborted = sample.status in (SampleStatus.ABORTED, SampleStatus.PENDING)
    reason = sample.finish_reason.kind if sample.finish_reason else sample.error
    return Ended(clock(), tuple(sample.output_ids), "abort" if is_aborted else reason)


READERS: dict[str, Callable[[World, str], Coroutine[Any, Any, Ended]]] = {
    "generate": generate,
    "stream": stream,
    "driver": driver,
}


# -- moments --------------------------------------------------------------------------------


async def nothing(world: World) -> None: ...


async def hold(world: World) -> None:
    world.gate.set_state(GateState.HOLDING)


async def open_gate(world: World) -> None:
    world.gate.set_state(GateState.OPEN, weight_version=7)


async def freeze(world: World, mode: PauseMode = PauseMode.IN_PLACE) -> None:
    """A pause that keeps the requests on their engines."""
    world.gate.set_state(GateState.HOLDING)
    for engine in world.engines:
        await engine.pause_generation(mode)


async def retract(world: World) -> None:
    await freeze(world, PauseMode.RETRACT)


async def lose(world: World) -> None:
    """The only engine ends while the gate holds, so that its requests wait with their tokens."""
    world.gate.set_state(GateState.HOLDING)
    world.fakes["e0"].engine.die("killed by the test")
    await pass_time(0.01)


async def serve_other(world: World) -> None:
    world.serve("e1")
    await open_gate(world)


async def lose_and_send(world: World) -> None:
    """On the second engine, which has sent no token yet."""
    await lose(world)
    await serve_other(world)
    await pass_time(TOKEN_S / 2)
    assert len(world.engines[1].in_flight) == len(RIDS)


async def until_all_ended(world: World) -> None:
    await asyncio.wait(world.readers.values())


async def refuse(world: World) -> None:
    for engine in world.engines:
        for _ in range(2):
            error = EngineRejected("no", engine=engine.engine_id, status=500, body="no")
            engine.fail_next("abort_request", error)


async def not_answer(world: World) -> None:
    for engine in world.engines:
        engine.hold("abort_request")


@dataclass(frozen=True)
class Moment:
    """When the order comes.

    Attributes:
        before: what happens before any request.
        meanwhile: what happens before the order, when requests have five tokens.
        after: what lets the others go on.
        num_tokens: what each request has then.
        names: of the engines that serve at first; empty for both.
        reaches_engines: requests are there.
        is_taken: engines take the call.
    """

    meanwhile: Callable[[World], Coroutine[Any, Any, None]] = nothing
    before: Callable[[World], Coroutine[Any, Any, None]] = nothing
    after: Callable[[World], Coroutine[Any, Any, None]] = nothing
    num_tokens: int = 5
    names: Sequence[str] = ()
    reaches_engines: bool = True
    is_taken: bool = True


MOMENTS = {
    "held": Moment(before=hold, after=open_gate, num_tokens=0, reaches_engines=False),
    "in flight": Moment(),
    "paused": Moment(World.pause, after=World.resume, reaches_engines=False),
    "retracted": Moment(retract, after=World.resume),
    "frozen": Moment(freeze, after=World.resume),
    "engine lost": Moment(lose, after=serve_other, names=["e0"], reaches_engines=False),
    "engine replaced": Moment(lose_and_send, names=["e0"]),
    "finished": Moment(until_all_ended, num_tokens=NUM_TOKENS, reaches_engines=False),
    "refused": Moment(refuse, is_taken=False),
    "unanswered": Moment(not_answer, is_taken=False),
}
CASES = [
    pytest.param(
        *case,
        id="-".join(case).replace(" ", "_"),
        # Each moment, each target and each reader is in the default suite.
        marks=() if number % 11 == 0 else (pytest.mark.slow,),
    )
    for number, case in enumerate(product(MOMENTS, ORDERS, READERS))
]


@pytest.mark.parametrize(("when", "target", "reader"), CASES)
@virtual_time
async def test_an_abort_ends_what_it_names_and_no_other(
    when: str, target: str, reader: str
) -> None:
    moment, (body, named) = MOMENTS[when], ORDERS[target]
    loop = asyncio.get_running_loop()
    is_over = when == "finished"
    async with world_of(*moment.names) as world:
        await moment.before(world)
        for rid in RIDS:
            world.readers[rid] = asyncio.create_task(READERS[reader](world, rid))
        await pass_time(TOKEN_S * 5.5)
        await moment.meanwhile(world)
        sent_as = {admission.sent_as: admission.rid for admission in world.gate.in_flight}
        assert (set(sent_as.values()) == set(RIDS)) is moment.reaches_engines
        for rid in named & world.scopes.keys():
            world.scopes[rid].stop()
        began_s = loop.time()
        ordering = asyncio.create_task(world.order(body))
        while not (ordering.done() or world.ordered()):
            await pass_time(0.001)
        told = {sent_as[engines_id] for engines_id in world.ordered()}
        assert told == (named if moment.reaches_engines else set())
        if not moment.is_taken:
            assert world.final() == named
        assert world.final() <= named
        await pass_time(began_s + WITHIN_S - loop.time())
        for rid in named:
            assert world.readers[rid].done(), f"{rid} did not end"
        found = await ordering
        assert loop.time() - began_s < ANSWERED_WITHIN_S
        assert bool(found["failed"]) is bool(named and not moment.is_taken)
        assert not named & {admission.rid for admission in world.gate.in_flight}
        await moment.after(world)
        await pass_time(TOKEN_S * 5.5)
        on_engines = {rid for engine in world.engines for rid in engine.in_flight}
        assert not on_engines & world.ordered(), "an engine works on what has ended"
        await world.pause()
        await world.resume()
        for rid, reading in world.readers.items():
            how = await reading
            if rid not in named or is_over:
                assert (len(how.ids), how.kind) == (NUM_TOKENS, "length"), rid
            else:
                assert how.kind == "abort", rid
                assert moment.num_tokens <= len(how.ids) <= moment.num_tokens + 3, rid
            assert how.ids[:5] == beginning(rid)[: len(how.ids)], rid
        assert not world.proxy.live
        assert (world.gate.num_held, len(world.gate.in_flight)) == (0, 0)
