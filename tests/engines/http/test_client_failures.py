"""The client against a server that misbehaves on the socket, and its streams."""

import asyncio
import json
import pickle
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from engines.http.call import Deadlines
from engines.http.client import EngineClient
from engines.protocol import Endpoint, FinishReason, GenerateReply
from engines.protocol.errors import (
    EngineError,
    EngineHung,
    EngineRejected,
    EngineUnreachable,
    NotEncodable,
)
from engines.vllm.client import VllmClient

HALF = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
DEFAULT, SHORT = Deadlines(), Deadlines(control_s=0.05, flush_margin_s=0.05, generate_s=0.2)

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(answer: Answer, bodies: list[Any] | None = None) -> AsyncIterator[Endpoint]:
    """Calls ``answer`` for each connection once the request is read, then closes it."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    body = await reader.readexactly(int(line.partition(b":")[2]))
                    if bodies is not None:
                        bodies.append(json.loads(body))
            await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


def saying(*parts: bytes) -> Answer:
    """Sends the parts and closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Never answers; ends when the client leaves."""
    await reader.read()


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Drops the connection as a dying engine does."""
    writer.transport.abort()


@pytest.fixture
def refused() -> Endpoint:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Endpoint("127.0.0.1", free.getsockname()[1])


async def fail(endpoint: Endpoint, deadlines: Deadlines = DEFAULT) -> EngineError:
    client = EngineClient(endpoint, engine_id="decode-1", deadlines=deadlines)
    try:
        with pytest.raises(EngineError) as caught:
            await client.continue_generation()
    finally:
        await client.aclose()
    assert "engine decode-1: continue_generation" in str(caught.value)
    return caught.value


@pytest.mark.parametrize("client", [EngineClient, VllmClient])
async def test_what_json_cannot_express_is_the_callers_error_and_no_engines(
    refused: Endpoint, client: Any
) -> None:
    engine = client(refused, engine_id="e-0")
    with pytest.raises(NotEncodable, match=r"load_lora_adapter was not sent: .*set") as caught:
        await engine.load_lora_adapter("policy", {"a"})
    assert not isinstance(caught.value, EngineError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    await engine.aclose()


async def test_a_refused_connection_surely_did_nothing(refused: Endpoint):
    error = await fail(refused)
    assert isinstance(error, EngineUnreachable)
    assert not error.maybe_executed


@pytest.mark.parametrize(
    "answer", [reset, saying(), saying(HALF), saying(b"garbage\r\n\r\n")], ids=range(4)
)
async def test_a_connection_that_breaks_may_have_done_it(answer: Answer):
    async with raw_server(answer) as endpoint:
        error = await fail(endpoint)
    assert isinstance(error, EngineUnreachable)
    assert error.maybe_executed


async def test_no_answer_within_the_deadline_is_a_hang_that_states_the_budget():
    async with raw_server(silence) as endpoint:
        error = await fail(endpoint, SHORT)
    assert isinstance(error, EngineHung)
    assert error.budget_s == SHORT.control_s
    assert "took longer than 0.05 s" in str(error)


async def test_half_an_answer_does_not_extend_the_deadline():
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HALF)
        await silence(reader, writer)

    async with raw_server(half) as endpoint:
        assert isinstance(await fail(endpoint, SHORT), EngineHung)


async def test_an_unreadable_encoding_is_a_rejection():
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\n"
    async with raw_server(saying(head + b"abc")) as endpoint:
        assert isinstance(await fail(endpoint), EngineRejected)


async def test_flush_may_take_its_server_side_wait_and_a_margin():
    async with raw_server(silence) as endpoint:
        client = EngineClient(endpoint, deadlines=SHORT)
        with pytest.raises(EngineHung) as caught:
            await client.flush_cache(0.1)
        await client.aclose()
    assert caught.value.budget_s == pytest.approx(0.15)


async def test_a_probe_does_not_wait_behind_hanging_control_calls():
    async def only_probes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        if num_connections == 20:
            all_hang.set()
        if num_connections <= 20:
            await silence(reader, writer)
        await saying(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")(reader, writer)

    num_connections, all_hang = 0, asyncio.Event()
    async with raw_server(only_probes) as endpoint:
        client = EngineClient(endpoint, deadlines=Deadlines(control_s=60))
        hanging = [asyncio.create_task(client.continue_generation()) for _ in range(20)]
        await all_hang.wait()
        assert await client.is_ready()
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        await client.aclose()


async def test_a_probe_of_a_dead_engine_raises(refused: Endpoint):
    client = EngineClient(refused)
    with pytest.raises(EngineUnreachable, match="is_ready"):
        await client.is_ready()
    await client.aclose()


async def test_cancelling_a_call_is_not_an_engine_error():
    async with raw_server(silence) as endpoint:
        client = EngineClient(endpoint)
        call = asyncio.create_task(client.continue_generation())
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.aclose()


async def test_the_errors_survive_a_process_boundary(refused: Endpoint):
    error = await fail(refused)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def event(text: str, num_tokens: int, kind: str | None = None) -> bytes:
    """One cumulative piece of a stream, as SGLang's JSON writer prints it."""
    reason = None if kind is None else {"type": kind}
    meta = {"id": "r-1", "finish_reason": reason, "completion_tokens": num_tokens}
    piece = {"text": text, "output_ids": list(range(num_tokens)), "meta_info": meta}
    return b"data: " + json.dumps(piece, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
WHOLE = STREAM + event("a", 1) + event("ab", 2, "length") + DONE


async def stream(*parts: bytes, deadlines: Deadlines = DEFAULT) -> list[GenerateReply]:
    async with raw_server(saying(*parts)) as endpoint:
        client = EngineClient(endpoint, engine_id="decode-1", deadlines=deadlines)
        try:
            return [reply async for reply in client.stream_generate(text="2+2")]
        finally:
            await client.aclose()


async def test_a_stream_yields_all_that_came_so_far_until_done():
    first, last = await stream(WHOLE)
    assert (first.text, first.output_ids, first.finish_reason) == ("a", (0,), None)
    assert (last.text, last.output_ids, last.finish_reason) == (
        "ab",
        (0, 1),
        FinishReason("length"),
    )


async def test_a_stream_may_be_cut_anywhere():
    assert await stream(*(bytes([byte]) for byte in WHOLE)) == await stream(WHOLE)


async def test_line_ends_of_other_alphabets_do_not_split_an_event():
    text = "a\u2028b\u0085c\x1c"
    (reply,) = await stream(STREAM + event(text, 3, "stop") + DONE)
    assert reply.text == text


async def test_comments_blank_lines_and_carriage_returns_are_passed_over():
    tail = event("a", 1, "stop").replace(b"\n", b"\r\n") + b"data:[DONE]\r\n"
    assert len(await stream(STREAM + b": ping\r\n\r\n\n" + tail)) == 1


async def test_an_error_inside_a_stream_is_a_rejection_with_its_own_status():
    error = b'data: {"error": {"message": "too long", "code": 413}}\n\n'
    with pytest.raises(EngineRejected, match=r"engine decode-1: generate .*too long") as caught:
        await stream(STREAM + event("a", 1) + error + DONE)
    assert caught.value.status == 413


@pytest.mark.parametrize("garbage", [b"{", b"[]", b"{}", b"null", b"7"])
async def test_an_event_of_another_shape_is_a_rejection(garbage: bytes):
    with pytest.raises(EngineRejected, match="not understood"):
        await stream(STREAM + b"data: " + garbage + b"\n\n" + DONE)


@pytest.mark.parametrize("end", [b"", event("ab", 2, "stop"), b"data: [DONE]"], ids=range(3))
async def test_a_stream_that_ends_without_done_broke(end: bytes):
    with pytest.raises(EngineUnreachable, match=r"before \[DONE\]") as caught:
        await stream(STREAM + event("a", 1) + end)
    assert caught.value.maybe_executed


async def test_what_came_before_a_break_is_kept():
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await saying(STREAM + event("a", 1))(reader, writer)
        await seen.wait()
        await reset(reader, writer)

    seen = asyncio.Event()
    async with raw_server(dying) as endpoint:
        client = EngineClient(endpoint)
        replies = client.stream_generate(text="2+2")
        assert (await anext(replies)).text == "a"
        seen.set()
        with pytest.raises(EngineUnreachable):
            await anext(replies)
        await client.aclose()


async def test_a_refused_stream_quotes_the_engine():
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 13\r\n\r\n"
    with pytest.raises(EngineRejected, match=r"400.*duplicate rid") as caught:
        await stream(head + b"duplicate rid")
    assert caught.value.status == 400


async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await saying(STREAM + event("a", 1))(reader, writer)
    await silence(reader, writer)


async def test_a_stream_that_stalls_hangs_at_the_deadline_of_the_whole():
    async with raw_server(stall) as endpoint:
        client = EngineClient(endpoint, deadlines=SHORT)
        replies = client.stream_generate(text="2+2")
        assert (await anext(replies)).text == "a"
        with pytest.raises(EngineHung, match=r"longer than 0\.2 s"):
            await anext(replies)
        await client.aclose()


async def test_closing_a_stream_early_closes_the_connection():
    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stall(reader, writer)
        left.set()

    left = asyncio.Event()
    async with raw_server(watch) as endpoint:
        client = EngineClient(endpoint)
        async with aclosing(client.stream_generate(text="2+2")) as replies:
            await anext(replies)
            assert not left.is_set()
        await asyncio.wait_for(left.wait(), 5)
        await client.aclose()


async def test_a_streamed_request_says_so():
    bodies: list[Any] = []

    async with raw_server(saying(WHOLE), bodies) as endpoint:
        client = EngineClient(endpoint)
        assert [reply async for reply in client.stream_generate(input_ids=[1], rid="r-1")]
        await client.aclose()
    assert bodies == [
        {
            "input_ids": [1],
            "sampling_params": {"max_new_tokens": 128},
            "rid": "r-1",
            "stream": True,
        }
    ]
