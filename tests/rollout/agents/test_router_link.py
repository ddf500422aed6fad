"""A worker and its router: what is requested again, and what its client gets when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout.agents.failures import ChatFailure
from rollout.agents.plan import Ended
from rollout.agents.router_link import Progress, RouterLink
from rollout.driver.client import http_client
from rollout.router.http.fast_json import dumps
from rollout.rules.contract import NO_CONTRACT, Contract
from rollout.rules.routing import JUST_STARTED
from tests.rollout.router.generate_events import event, with_logprobs
from tests.rollout.router.stub_engine import STREAM, Connection, Script, Seen, StubEngine, chunk

WHOLE = with_logprobs(5, 6, finish="stop")[6:-2]
JSON = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nX-Engine-Id: e-3\r\n"
JSON += b"Content-Length: %d\r\n\r\n"


@asynccontextmanager
async def linked(script: Script, *, timeout_s: float = 30.0) -> AsyncIterator[RouterLink]:
    router = StubEngine("router", script)
    await router.start()
    keys = {"client_key": "c", "control_key": "k"}
    link = RouterLink(router.endpoint.url, **keys, request_timeout_s=timeout_s)
    await link.open()
    try:
        yield link
    finally:
        await link.close()
        await router.stop()


async def replies(link: RouterLink, contract: Contract = NO_CONTRACT) -> list[Progress | Ended]:
    return [reply async for reply in link.generate("s", b"{}", contract)]


def after_losses(num: int, then: Script) -> tuple[Script, list[Seen]]:
    """A router whose connections break so often before it answers, and what it gets."""
    seen_all: list[Seen] = []

    async def script(connection: Connection, seen: Seen) -> None:
        seen_all.append(seen)
        if len(seen_all) <= num:
            connection.reset()
        else:
            await then(connection, seen)

    return script, seen_all


async def whole(connection: Connection, seen: Seen) -> None:
    await connection.send(JSON % (b"200 OK", len(WHOLE)), WHOLE)


async def test_a_turn_is_requested_again_unchanged_when_its_router_was_lost() -> None:
    script, seen = after_losses(3, whole)
    async with linked(script) as link:
        (ended,) = await replies(link, Contract(min_weight_version=4))
    assert isinstance(ended, Ended)
    assert ended.reply.output_ids == (5, 6)
    assert ended.signed == {"x-engine-id": "e-3"}
    first, *others = [(one.method, one.target, one.body, one.headers) for one in seen]
    assert others == [first] * 3
    sent = {name.lower(): value for name, value in first[3]}
    assert sent["authorization"] == "Bearer c"
    assert (sent["x-affinity"], sent["x-min-weight-version"]) == ("s", "4")
    assert sent["x-token-failover"] == "on"


async def test_a_router_that_has_just_started_again_is_tried_again() -> None:
    body = dumps({"error": {"message": f"no engine: {JUST_STARTED}"}})
    answers = [answering(b"503 Service Unavailable", body)] * 2 + [whole]

    async def script(connection: Connection, seen: Seen) -> None:
        await answers.pop(0)(connection, seen)

    async with linked(script) as link:
        (ended,) = await replies(link)
    assert isinstance(ended, Ended)
    assert answers == []


async def test_a_router_that_does_not_come_back_is_a_502(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_RECONNECT_S", 0.2)
    async with linked(whole) as link:
        pass
    await link.open()
    with pytest.raises(ChatFailure, match="router_lost") as lost:
        await replies(link)
    await link.close()
    assert lost.value.status == 502


async def test_a_stream_that_has_begun_is_not_begun_again() -> None:
    """Its client has tokens that another request would not have."""

    async def break_off(connection: Connection, seen: Seen) -> None:
        await connection.send(STREAM, chunk(with_logprobs(1, 2, finish="")))
        await shown.wait()
        connection.reset()

    shown = asyncio.Event()
    script, seen = after_losses(1, break_off)
    async with linked(script) as link:
        stream = link.generate("s", b"{}", NO_CONTRACT)
        progress = await anext(stream)
        assert isinstance(progress, Progress)
        assert (list(progress.ids), progress.logprobs_from(1)) == ([1, 2], [-1.0])
        shown.set()
        with pytest.raises(ChatFailure, match="router_lost"):
            await anext(stream)
    assert len(seen) == 2


async def test_events_that_have_arrived_together_are_one() -> None:
    async def at_once(connection: Connection, seen: Seen) -> None:
        events = [with_logprobs(*range(1, num), finish="") for num in range(2, 5)]
        end = with_logprobs(1, 2, 3, 4, finish="length") + b"data: [DONE]\n\n"
        await connection.send(STREAM + b"".join(map(chunk, events)))
        await read.wait()
        await connection.send(chunk(end[:100]), chunk(end[100:]) + b"0\r\n\r\n")

    read = asyncio.Event()
    async with linked(at_once) as link:
        stream = link.generate("s", b"{}", NO_CONTRACT)
        first = await anext(stream)
        assert isinstance(first, Progress)
        assert list(first.ids) == [1, 2, 3]
        read.set()
        (last,) = [reply async for reply in stream]
    assert isinstance(last, Ended)
    assert last.reply.output_ids == (1, 2, 3, 4)


def answering(status: bytes, body: bytes) -> Script:
    async def script(connection: Connection, seen: Seen) -> None:
        await connection.send(JSON % (status, len(body)), body)

    return script


def streaming(*parts: bytes) -> Script:
    async def script(connection: Connection, seen: Seen) -> None:
        await connection.send(STREAM, *map(chunk, parts), b"0\r\n\r\n")

    return script


ERROR = b'{"error": {"type": "engine_failure", "message": "engine e-3 failed"}}'


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        (answering(b"409 Conflict", b"past"), 409, "past"),
        (answering(b"200 OK", ERROR), 502, "engine e-3 failed"),
        (answering(b"200 OK", b"[]"), 502, "engine e-3 sent an unusable reply"),
        (answering(b"200 OK", b"{"), 502, "engine e-3 sent an unusable reply"),
        (answering(b"200 OK", event(1, 2, finish="stop")[6:]), 502, "unusable reply"),
        (answering(b"200 OK", with_logprobs(1, finish="")[6:]), 502, "before its last token"),
        (streaming(b"data: " + ERROR + b"\n\n"), 502, "engine e-3 failed"),
        (streaming(b"data: [DONE]\n\n"), 502, "before its first token"),
        (streaming(with_logprobs(1, finish="")), 502, "before its last token"),
        (streaming(b"data: {\n\n"), 502, "unusable reply"),
    ],
)
async def test_what_is_no_reply_is_the_turns_failure(
    script: Script, status: int, words: str
) -> None:
    async with linked(script) as link:
        with pytest.raises(ChatFailure, match=words) as failure:
            await replies(link)
    assert failure.value.status == status


async def test_a_router_that_does_not_answer_ends_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def wait(connection: Connection, seen: Seen) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("rollout.agents.router_link._MARGIN_S", 0.0)
    async with linked(wait, timeout_s=0.2) as link:
        with pytest.raises(ChatFailure) as late:
            await replies(link)
    assert late.value.status == 504


async def test_a_turn_that_is_closed_ends_its_request() -> None:
    async def wait(connection: Connection, seen: Seen) -> None:
        entered.set()
        await connection.reader.read(1)
        left.set()

    entered, left = asyncio.Event(), asyncio.Event()
    async with linked(wait) as link:
        asked = asyncio.ensure_future(replies(link))
        await entered.wait()
        asked.cancel()
        async with asyncio.timeout(10):
            await left.wait()


@pytest.mark.parametrize(
    ("answers", "folder"),
    [
        ({"/model_info": b'{"tokenizer_path": "/t", "model_path": "/m"}'}, "/t"),
        ({"/model_info": b'{"tokenizer_path": "", "model_path": "/m"}'}, "/m"),
        ({"/v1/models": b'{"data": [{"id": "m", "root": "/v"}]}'}, "/v"),
        ({"/model_info": b"[]"}, None),
        ({"/v1/models": b'{"data": []}'}, None),
        ({}, None),
    ],
)
async def test_the_folder_of_the_tokenizer_is_that_of_the_engines(
    answers: dict[str, bytes], folder: str | None
) -> None:
    async def script(connection: Connection, seen: Seen) -> None:
        body = answers.get(seen.target)
        status = b"404 Not Found" if body is None else b"200 OK"
        await connection.send(JSON % (status, len(body or b"")), body or b"")

    find: Callable[[RouterLink], Any] = RouterLink.tokenizer_folder
    async with linked(script) as link:
        if folder is not None:
            assert await find(link) == folder
            return
        with pytest.raises(ChatFailure, match="no engine names the folder") as none:
            await find(link)
        assert (none.value.status, none.value.retry_after) == (503, "2")
