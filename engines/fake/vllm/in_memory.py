"""Fake vLLM servers in this process, and the real client over them without a socket."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from engines.fake.launcher import FakeLauncher, settings_of
from engines.fake.vllm.fake_vllm import TEXT, FakeVllm
from engines.http.call import Deadlines
from engines.http.connections import HttpReply
from engines.protocol import Endpoint
from engines.protocol.errors import EngineRejected
from engines.protocol.spec import EngineSpec
from engines.vllm.client import VllmClient

# Longer than the deadlines of the phases: those are what is tested.
_PATIENT = Deadlines(
    control_s=1e6, pause_s=1e6, memory_s=1e6, update_s=1e6, check_s=1e6, ready_s=1e6, health_s=1e6
)


class InMemoryWire:
    """``engines.http.base_client.Wire`` to a fake in this process."""

    def __init__(self, engine: FakeVllm) -> None:
        self.engine = engine

    async def get(self, path: str) -> HttpReply:
        return await self._ask(path, {})

    async def post(self, path: str, content: bytes) -> HttpReply:
        return await self._ask(path, json.loads(content))

    async def _ask(self, path: str, body: dict[str, Any]) -> HttpReply:
        parts = urlsplit(path)
        try:
            answer = await self.engine.answer(parts.path, {**dict(parse_qsl(parts.query)), **body})
        except EngineRejected as error:
            return refusal(error)
        return HttpReply(HTTPStatus.OK, written(answer))

    @asynccontextmanager
    async def post_for_stream(
        self, path: str, content: bytes
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        async with aclosing(self.engine.stream(json.loads(content))) as events:
            try:
                first = await anext(events)
            except EngineRejected as error:
                reply = refusal(error)
                yield reply.status, _pieces([reply.body])
                return
            yield HTTPStatus.OK, _lines(first, events)

    async def aclose(self) -> None:
        await self.engine.aclose()


async def _pieces(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def _lines(first: dict[str, Any], events: AsyncGenerator[Any, None]) -> AsyncIterator[bytes]:
    yield as_event(first)
    async for event in events:
        yield as_event(event)
    yield b"data: [DONE]\n\n"


def as_event(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def written(answer: dict[str, Any]) -> bytes:
    """The body of an answer."""
    if answer.keys() == {TEXT}:
        return str(answer[TEXT]).encode()
    return json.dumps(answer).encode()


def refusal(error: EngineRejected) -> HttpReply:
    """vLLM's form of an error."""
    status = error.status or 500
    message = error.body or str(error)
    body = {"error": {"message": message, "type": "InternalServerError", "code": status}}
    return HttpReply(status, json.dumps(body).encode())


class _FakeClient(VllmClient):
    """Sends payloads as they are: those of fakes hold no numbers for a safetensors file."""

    async def _info_of(self, payloads: Sequence[str]) -> Mapping[str, Any]:
        return {"content": payloads[0]}


def connect_in_memory(engine: FakeVllm, *, weights_cpu_backup: bool = False) -> VllmClient:
    """The real client over a fake."""
    return _FakeClient(
        engine.endpoint,
        engine_id=engine.engine_id,
        deadlines=_PATIENT,
        weights_cpu_backup=weights_cpu_backup,
        wire=InMemoryWire(engine),
    )


def make_vllm(spec: EngineSpec, endpoint: Endpoint, **settings: Any) -> FakeVllm:
    """The fake vLLM of a spec; ``settings`` are further arguments of ``FakeVllm``."""
    return FakeVllm(spec.engine_id, **settings_of(spec, endpoint), **settings)


class VllmFakeLauncher(FakeLauncher):
    """``FakeLauncher`` of fake vLLM servers."""

    def __init__(self, make: Any = make_vllm) -> None:
        super().__init__(make)

    def connect(self, endpoint: Endpoint, engine_id: str) -> VllmClient:  # type: ignore[override]
        """The real client over the engine that listens there."""
        engine = self._by_endpoint[endpoint]
        assert isinstance(engine, FakeVllm)
        return connect_in_memory(engine, weights_cpu_backup=engine.settings.weights_cpu_backup)
