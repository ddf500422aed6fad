"""Stubs of vLLM in this process with the real client over them, and stubs that listen."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from aiohttp import web

from engines.fake.http_fake import ServedFake, access_for, key_check
from engines.fake.launcher import FakeLauncher, Make, settings_of
from engines.http.call import Deadlines
from engines.http.connections import HttpReply
from engines.launch import check_spec
from engines.protocol import Endpoint
from engines.protocol.errors import EngineError, EngineRejected
from engines.protocol.spec import EngineSpec
from engines.vllm.client import VllmClient
from tests.support.vllm_stub.stub import StubVllm

# Longer than the deadlines of the phases: those are what is tested.
_PATIENT = Deadlines(
    control_s=1e6, pause_s=1e6, memory_s=1e6, update_s=1e6, check_s=1e6, ready_s=1e6, health_s=1e6
)
_JSON = "application/json"
_STREAM = "text/event-stream; charset=utf-8"


class StubWire:
    """``engines.http.http_calls.Wire`` to a stub in this process."""

    def __init__(self, engine: StubVllm) -> None:
        self.engine = engine

    async def get(self, path: str) -> HttpReply:
        return await self.post(path, b"{}")

    async def post(self, path: str, content: bytes) -> HttpReply:
        parts, body = urlsplit(path), json.loads(content or b"{}")
        try:
            reply = await self.engine.answer(parts.path, {**dict(parse_qsl(parts.query)), **body})
        except EngineRejected as error:
            return HttpReply(error.status or 500, error.body.encode())
        return HttpReply(
            HTTPStatus.OK, (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        )

    @asynccontextmanager
    async def post_for_stream(
        self, path: str, content: bytes
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        async with aclosing(self.engine.stream(json.loads(content), path)) as events:
            try:
                lines, status = _lines(await anext(events), events), HTTPStatus.OK
            except EngineRejected as error:
                lines, status = _lines(error.body), HTTPStatus(error.status or 500)
            yield status, lines

    async def aclose(self) -> None:
        await self.engine.aclose()


async def _lines(first: Any, rest: AsyncIterator[Any] | None = None) -> AsyncIterator[bytes]:
    """Those of a stream, or the body of an error."""
    if rest is None:
        yield first.encode()
        return
    yield _line(first)
    async for event in rest:
        yield _line(event)
    yield b"data: [DONE]\n\n"


def _line(event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


class _StubClient(VllmClient):
    """Sends payloads as they are: those of fakes hold no numbers for a safetensors file."""

    async def _info_of(self, payloads: Sequence[str]) -> Mapping[str, Any]:
        return {"content": payloads[0]}


def connect_to_stub(engine: StubVllm) -> VllmClient:
    """The real client over a stub."""
    return _StubClient(
        engine.endpoint,
        engine_id=engine.engine_id,
        deadlines=_PATIENT,
        weights_cpu_backup=engine.settings.weights_cpu_backup,
        wire=StubWire(engine),
    )


def make_stub(spec: EngineSpec, endpoint: Endpoint, **settings: Any) -> StubVllm:
    """The stub of a spec; ``settings`` are further arguments of ``FakeEngine``."""
    return StubVllm(spec.engine_id, **settings_of(spec, endpoint), **settings)


class StubLauncher(FakeLauncher):
    """``FakeLauncher`` of stubs."""

    def __init__(self, make: Make = make_stub) -> None:
        super().__init__(make)

    def connect(self, endpoint: Endpoint, engine_id: str) -> VllmClient:  # type: ignore[override]
        """The real client over the engine that listens there."""
        engine = self._by_endpoint[endpoint]
        assert isinstance(engine, StubVllm)
        return connect_to_stub(engine)


class ServedStubs:
    """``launch.EngineLauncher`` of stubs that listen on a port of their own."""

    def __init__(self, make: Make = make_stub) -> None:
        self._make = make

    async def launch(self, spec: EngineSpec) -> ServedFake:
        """Start it; its endpoint is known only then.

        Raises:
            ValueError: vLLM itself would not be started with this specification.
        """
        check_spec(spec)
        wire: StubWire

        async def serve(request: web.Request) -> web.StreamResponse:
            return await _serve(wire, request)

        access = access_for(spec)
        check_keys = key_check(access, lambda: [f"instance_id {engine.random_seed}"])
        app = web.Application(client_max_size=2**30, middlewares=[check_keys])
        app.router.add_route("*", "/{path:.*}", serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, spec.host, 0).start()
        engine = self._make(spec, Endpoint(spec.host, runner.addresses[0][1]))
        assert isinstance(engine, StubVllm)
        wire = StubWire(engine)
        return ServedFake(engine, runner, access, spec.gpu_ids)


async def _serve(wire: StubWire, request: web.Request) -> web.StreamResponse:
    """The stub's reply; a dead stub breaks the connection."""
    content = await request.read() or b"{}"
    try:
        if not json.loads(content).get("stream"):
            reply = await wire.post(str(request.rel_url), content)
            return web.Response(status=reply.status, body=reply.body, content_type=_JSON)
        async with wire.post_for_stream(request.path, content) as (status, lines):
            kind = _STREAM if status == HTTPStatus.OK else _JSON
            response = web.StreamResponse(status=status, headers={"Content-Type": kind})
            await response.prepare(request)
            async for line in lines:
                await response.write(line)
            return response
    except EngineError:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)
