"""The data path over real sockets."""

import asyncio
import gzip
import json
import logging
import socket

import aiohttp
import pytest

from engines.protocol import Endpoint
from rollout.router import Backend, BackendState
from tests.rollout.router.conftest import hold_one, router_config
from tests.rollout.router.raw import connect, post, response_to
from tests.rollout.router.stub_engine import (
    Hold,
    chunk,
    die_unanswered,
    die_within_body,
    hold_then_reply,
    reply,
    stream,
)

PROMPT = {"input_ids": [1, 2, 3]}


async def test_a_reply_comes_back_with_engine_and_weight_version(make_bench):
    bench = await make_bench(reply(b'{"text": "hello"}', headers=("X-Own: 1",)))
    response = await bench.ask()
    assert (response.status, response.json) == (200, {"text": "hello"})
    assert response.headers["x-engine-id"] == "e-0"
    assert response.headers["x-weight-version"] == "7"
    assert response.headers["x-own"] == "1"
    assert "transfer-encoding" not in response.headers


async def test_generate_gets_a_rid_and_the_weight_version(make_bench):
    bench = await make_bench(reply())
    await bench.ask()
    body = bench.engines[0].seen[0].json
    assert len(body.pop("rid")) == 32
    assert body == {**PROMPT, "extra_key": "run:v7"}


async def test_a_clients_rid_stays_with_the_router_and_other_routes_are_not_touched(make_bench):
    bench = await make_bench(reply())
    await bench.ask("/generate", json={"rid": "mine", "extra_key": "k"})
    await bench.ask("/v1/embeddings", json=PROMPT)
    generate, embed = (seen.json for seen in bench.engines[0].seen)
    assert len(generate.pop("rid")) == 32
    assert (generate, embed) == ({"extra_key": "run:v7:k"}, PROMPT)


@pytest.mark.parametrize("failover", ["off", "on"])
@pytest.mark.parametrize(
    ("path", "is_vllm"),
    [
        ("/generate", False),
        ("/generate", True),
        ("/inference/v1/generate", True),
        ("/v1/completions", False),
        ("/v1/completions", True),
        ("/v1/chat/completions", False),
        ("/v1/chat/completions", True),
        ("/v1/responses", False),
        ("/v1/responses", True),
    ],
)
async def test_the_own_key_of_a_client_is_inside_run_and_version_on_every_route(
    make_bench, path, is_vllm, failover
):
    bench = await make_bench(reply(), config=router_config(token_failover=failover))
    await bench.host.set_members(2, [bench.member(0, kind="vllm" if is_vllm else "sglang")])
    theirs = "cache_salt" if is_vllm else "extra_key"
    own = "extra_key" if path == "/generate" else theirs
    bodies = {
        "/generate": PROMPT,
        "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
        "/v1/completions": {"prompt": [1]},
    }
    for key in ({}, {own: "mine"}):
        await bench.ask(path, json={**bodies.get(path, {"messages": []}), **key})
    plain, keyed = (seen.json[theirs] for seen in bench.engines[0].seen)
    assert (plain, keyed) == ("run:v7", "run:v7:mine")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_openai_requests_get_them_too(make_bench, path):
    bench = await make_bench(reply())
    await bench.ask(path, json=PROMPT)
    body = bench.engines[0].seen[0].json
    assert len(body.pop("rid")) == 32
    assert body == {**PROMPT, "extra_key": "run:v7"}


async def test_method_query_and_headers_pass_and_hop_by_hop_headers_do_not(make_bench):
    bench = await make_bench(reply())
    await response_to(
        bench,
        b"PUT /v1/%73core?x=1&y=%20z HTTP/1.1\r\nHost: localhost\r\nX-Keep: yes\r\n"
        b"Connection: close, X-Hop\r\nX-Hop: no\r\nTE: trailers\r\nTransfer-Encoding: chunked\r\n"
        b"\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    )
    (seen,) = bench.engines[0].seen
    assert (seen.method, seen.target) == ("PUT", "/v1/%73core?x=1&y=%20z")
    assert seen.body == b"abcde"
    assert seen.header("host") == [bench.engines[0].endpoint.url.removeprefix("http://")]
    assert seen.header("x-keep") == ["yes"]
    for name in ("x-hop", "te", "transfer-encoding", "user-agent", "accept-encoding"):
        assert seen.header(name) == []


async def test_get_and_head_pass_without_a_body(make_bench):
    bench = await make_bench(reply(b"listing"))
    assert (await bench.ask("/v1/embeddings", "GET")).body == b"listing"
    response = await bench.ask("/v1/embeddings", "HEAD")
    assert (response.status, response.headers["content-length"]) == (200, "7")
    assert [seen.method for seen in bench.engines[0].seen] == ["GET", "HEAD"]
    assert all(seen.header("content-length") == [] for seen in bench.engines[0].seen)


async def test_an_encoded_reply_is_passed_on_undecoded(make_bench):
    packed = gzip.compress(b"x" * 1000)
    bench = await make_bench(reply(packed, headers=("Content-Encoding: gzip",)))
    response = await bench.ask()
    assert response.headers["content-encoding"] == "gzip"
    assert response.body == packed


async def test_an_encoded_request_is_passed_on_unchanged(make_bench):
    bench = await make_bench(reply())
    packed = gzip.compress(json.dumps(PROMPT).encode())
    await bench.ask("/generate", data=packed, headers={"Content-Encoding": "gzip"})
    (seen,) = bench.engines[0].seen
    assert (seen.body, seen.header("content-encoding")) == (packed, ["gzip"])


async def test_bodies_of_32_mb_and_replies_of_8_mb_pass(make_bench):
    bench = await make_bench(reply(b"y" * (8 << 20)))
    body = b"x" * (32 << 20)
    assert len((await bench.ask("/v1/completions", data=b"x")).body) == 8 << 20
    reader, writer = await connect(bench, post(body, b"/v1/completions", b"Connection: close\r\n"))
    assert (await reader.read()).endswith(b"y" * 100)
    writer.close()
    assert len(bench.engines[0].seen[1].body) == 32 << 20


async def test_a_slowly_sent_body_arrives_whole(make_bench):
    bench = await make_bench(reply())
    message = post(json.dumps(PROMPT).encode(), extra=b"Connection: close\r\n")
    reader, writer = await connect(bench)
    for index in range(0, len(message), 16):
        writer.write(message[index : index + 16])
        await writer.drain()
        await asyncio.sleep(0)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    assert bench.engines[0].seen[0].json["input_ids"] == [1, 2, 3]


async def test_stream_chunks_arrive_before_the_stream_has_ended(make_bench):
    hold = Hold()
    bench = await make_bench(stream(b"data: 1\n\n", hold, b"data: [DONE]\n\n"))
    async with bench.client.post("/generate", json={**PROMPT, "stream": True}) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        assert not hold.opened.is_set()
        hold.opened.set()
        assert await response.content.read() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "429 Slow", "500 Oops"])
async def test_an_engines_reply_is_final(make_bench, status):
    bench = await make_bench(reply(b"no", status), reply(b"no", status))
    response = await bench.ask()
    assert (response.status, response.body) == (int(status[:3]), b"no")
    assert sum(len(engine.seen) for engine in bench.engines) == 1
    assert (await bench.host.stats())["num_retried"] == 0


@pytest.mark.parametrize("path", ["/generate", "/v1/score"])
async def test_a_redirect_does_not_name_the_engines_address(make_bench, path):
    """Behind it there is no gate, and it needs no key of the router."""
    bench = await make_bench(reply(b"", "307 Temporary", ("Location: http://127.0.0.1:1/",)))
    for _ in range(3):  # also from the cache of heads
        response = await bench.ask(path, json=PROMPT, allow_redirects=False)
        assert response.status == 307
        assert "location" not in response.headers


async def test_cookies_of_one_client_are_not_sent_for_another(make_bench):
    bench = await make_bench(reply(headers=("Set-Cookie: a=1",)))
    for _ in range(2):
        await response_to(bench, post(b"{}", extra=b"Connection: close\r\n"))
    assert [seen.header("cookie") for seen in bench.engines[0].seen] == [[], []]


async def test_requests_share_the_engines(make_bench):
    holds = [Hold(), Hold()]
    bench = await make_bench(*(hold_then_reply(hold) for hold in holds))
    pending = [bench.begin() for _ in "12"]
    for hold in holds:
        await hold.entered.wait()
    engines = (await bench.host.stats())["engines"]
    assert [engine["num_in_flight"] for engine in engines] == [1, 1]
    for hold in holds:
        hold.opened.set()
    assert {response.status for response in await asyncio.gather(*pending)} == {200}


# -- engines that fail ----------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["refused", "head reset", "unanswered"])
async def test_an_engine_gone_before_its_first_byte_is_replaced_by_another(make_bench, failure):
    script = {"refused": reply(), "head reset": None, "unanswered": die_unanswered()}[failure]
    bench = await make_bench(script, reply())
    if failure == "refused":
        bench.engines[0].refuse()
    for _ in range(4):
        response = await bench.ask()
        assert (response.status, response.headers["x-engine-id"]) == (200, "e-1")
    stats = await bench.host.stats()
    assert [engine["state"] for engine in stats["engines"]] == ["dead", "serving"]
    assert (stats["num_retried"], stats["engines"][0]["num_failures"]) == (1, 1)
    (report,) = bench.failures
    assert (report.engine_id, report.has_left_routing) == ("e-0", True)


@pytest.mark.parametrize("rid", [{}, {"rid": "mine"}])
async def test_a_second_attempt_has_the_same_body_and_another_rid(make_bench, rid):
    bench = await make_bench(die_unanswered(), reply())
    await bench.ask(json={**PROMPT, **rid})
    (first,), (second,) = ([seen.json for seen in engine.seen] for engine in bench.engines)
    assert first.pop("rid") != second.pop("rid")
    assert first == second


async def test_no_other_engine_is_a_502_that_names_the_engine_and_no_traceback(make_bench, caplog):
    bench = await make_bench(None)
    response = await bench.ask()
    error = response.json["error"]
    assert (response.status, response.headers["x-engine-id"]) == (502, "e-0")
    assert (error["type"], error["engine"]) == ("engine_failure", "e-0")
    assert "e-0 failed /generate" in error["message"]
    assert "engine e-0 failed POST /generate" in caplog.text
    assert not any(record.exc_info for record in caplog.records)


async def test_only_two_engines_are_tried(make_bench):
    bench = await make_bench(None, None, reply())
    response = await bench.ask()
    assert response.status == 502
    assert response.json["error"]["engine"] == "e-1"
    assert bench.engines[2].seen == []


async def test_an_engine_that_refuses_the_connection_is_no_attempt(make_bench):
    bench = await make_bench(reply(), reply(), None, reply())
    for engine in bench.engines[:2]:
        engine.refuse()
    response = await bench.ask()
    assert (response.status, response.headers["x-engine-id"]) == (200, "e-3")


async def test_a_request_waits_while_its_only_engine_may_return(make_bench):
    bench = await make_bench(None)
    await bench.host.set_members(2, [bench.member(0, may_return=True)])
    pending = bench.begin()
    await bench.wait_until_held(1)
    assert (await bench.host.stats())["gate"]["state"] == "holding"
    bench.engines[0].resets_heads = False
    await bench.host.set_members(3, [bench.member(0, may_return=True)])
    assert (await pending).status == 200


async def test_requests_after_the_last_engine_died_get_the_reason(make_bench):
    bench = await make_bench(None)
    await bench.ask()
    response = await bench.ask()
    assert (response.status, response.headers["retry-after"]) == (503, "2")
    assert "e-0 is dead" in response.json["error"]["message"]
    assert bench.engines[0].num_connections == 1


async def test_a_dead_engine_that_was_verified_gets_requests_again(make_bench):
    bench = await make_bench(None)
    await bench.ask()
    bench.engines[0].resets_heads = False
    await bench.host.set_members(2, [bench.member(0)])
    response = await bench.ask()
    assert response.status == 200


async def test_an_engine_that_sends_no_http_has_failed(make_bench):
    async def gibberish(connection, seen):
        await connection.send(b"SSH-2.0-OpenSSH\r\n\r\n")

    bench = await make_bench(gibberish)
    response = await bench.ask()
    assert response.status == 502


async def test_an_engine_that_takes_no_connection_in_time_is_replaced(make_bench):
    bench = await make_bench(reply(), reply(), config=router_config(connect_timeout_s=0.1))
    with socket.socket() as full, socket.socket() as first:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        first.connect(full.getsockname())
        stuck = Backend("e-0", Endpoint(*full.getsockname()))
        await bench.host.set_members(2, [stuck, bench.member(1)])
        response = await bench.ask()
    assert (response.status, response.headers["x-engine-id"]) == (200, "e-1")
    assert (bench.failures[0].engine_id, bench.failures[0].has_left_routing) == ("e-0", True)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nX-Odd: a\x01b\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 999 Odd\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 200_000 + b"\r\n\r\n",
    ],
)
async def test_a_head_that_is_not_http_is_a_502_and_never_a_traceback(make_bench, caplog, head):
    async def odd(connection, seen):
        await connection.send(head)

    bench = await make_bench(odd)
    assert (await bench.ask()).status == 502
    assert not any(record.exc_info for record in caplog.records)


async def test_an_engine_that_dies_within_its_reply_cuts_the_connection(make_bench, caplog):
    hold = Hold()
    bench = await make_bench(die_within_body(hold), reply())
    response = await bench.client.post("/generate", json=PROMPT)
    assert response.headers["x-engine-id"] == "e-0"
    hold.opened.set()
    with pytest.raises(aiohttp.ClientPayloadError):
        await response.read()
    assert bench.engines[1].seen == []
    assert "engine e-0 failed POST /generate: broke off its reply" in caplog.text
    assert not any(record.levelno >= logging.ERROR for record in caplog.records)
    stats = await bench.host.stats()
    assert (stats["num_broken_replies"], stats["engines"][0]["state"]) == (1, "dead")


async def test_an_event_stream_that_breaks_between_events_ends_with_an_error_event(make_bench):
    hold = Hold()
    bench = await make_bench(stream(b"data: 1\n\n", hold, then_reset=True))
    async with bench.client.post("/generate", json=PROMPT) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        hold.opened.set()
        last, rest = (await response.content.read()).split(b"\n\n")
    assert rest == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["engine"] == "e-0"


async def test_an_event_stream_that_breaks_within_an_event_is_cut(make_bench, caplog):
    hold = Hold()
    bench = await make_bench(stream(b'data: {"te', hold, then_reset=True))
    response = await bench.client.post("/generate", json=PROMPT)
    assert await response.content.readany() == b'data: {"te'
    hold.opened.set()
    with pytest.raises(aiohttp.ClientPayloadError):
        await response.read()
    assert not any(record.levelno >= logging.ERROR for record in caplog.records)


# -- clients that leave ---------------------------------------------------------------------


async def test_a_client_that_leaves_before_the_reply_ends_the_work_at_once(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    _, writer = await connect(bench, post(b"{}"))
    await hold.entered.wait()
    writer.close()
    await asyncio.wait_for(bench.engines[0].peer_closed.wait(), 2)
    await bench.host.drained(2)
    stats = await bench.host.stats()
    assert (stats["num_clients_left"], stats["engines"][0]["state"]) == (1, "serving")
    assert bench.failures == []


async def test_a_client_that_leaves_within_a_stream_ends_the_work_at_once(make_bench):
    hold = Hold()
    bench = await make_bench(stream(b"data: 1\n\n", hold))
    bench.engines[0].script = endless
    reader, writer = await connect(bench, post(b"{}"))
    await reader.readuntil(b"data: 1\n\n")
    writer.close()
    await asyncio.wait_for(bench.engines[0].peer_closed.wait(), 2)
    assert bench.failures == []


async def endless(connection, seen):
    await connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    await connection.send(chunk(b"data: 1\n\n"))
    await connection.reader.readexactly(1)


async def test_a_client_that_does_not_read_slows_its_engine_down_and_can_leave(make_bench):
    stalled = asyncio.Event()
    num_sent = 0

    async def flood(connection, seen):
        nonlocal num_sent
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        try:
            while num_sent < 1000:
                await asyncio.wait_for(connection.send(b"x" * 65536), 0.2)
                num_sent += 1
        except TimeoutError:
            stalled.set()
        await connection.reader.readexactly(1)

    bench = await make_bench(flood)
    reader, writer = await connect(bench, post(b"{}"))
    await reader.readexactly(1000)
    await asyncio.wait_for(stalled.wait(), 5)
    writer.transport.abort()
    await asyncio.wait_for(bench.engines[0].peer_closed.wait(), 2)
    assert bench.failures == []


async def test_a_client_that_leaves_while_its_body_is_read_costs_nothing(make_bench):
    bench = await make_bench(reply())
    _, writer = await connect(bench, post(b"x" * 100)[:-50])
    writer.close()
    while (await bench.host.stats())["num_clients_left"] != 1:
        pass
    stats = await bench.host.stats()
    assert (stats["num_admitted"], bench.engines[0].seen) == (0, [])


# -- the gate -------------------------------------------------------------------------------


async def test_held_requests_reach_an_engine_when_the_gate_opens(make_bench):
    bench = await make_bench(reply())
    await bench.host.set_gate("holding", phase="offloaded")
    pending = bench.begin()
    await bench.wait_until_held(1)
    assert bench.engines[0].seen == []
    await bench.host.set_gate("open", weight_version=8)
    response = await pending
    assert (response.status, response.headers["x-weight-version"]) == (200, "8")
    assert bench.engines[0].seen[0].json["extra_key"] == "run:v8"


async def test_one_more_than_may_be_held_is_refused_with_a_retry_time(make_bench):
    bench = await make_bench(reply())
    await bench.host.set_gate("holding", reason="training", phase="offloaded")
    pending = [bench.begin() for _ in range(4)]
    await bench.wait_until_held(4)
    response = await bench.ask()
    error = response.json["error"]
    assert (response.status, response.headers["retry-after"]) == (503, "2")
    assert (error["gate"], error["reason"], error["phase"]) == ("holding", "training", "offloaded")
    await bench.host.set_gate("open")
    assert {response.status for response in await asyncio.gather(*pending)} == {200}


async def test_a_held_request_past_its_deadline_is_refused_with_a_retry_time(make_bench):
    bench = await make_bench(reply(), config=router_config(hold_timeout_s=0.02))
    await bench.host.set_gate("holding", reason="training", phase="offloaded")
    response = await bench.ask()
    error = response.json["error"]
    assert (response.status, response.headers["retry-after"]) == (503, "2")
    assert "not released" in error["message"]
    assert bench.engines[0].seen == []


async def test_a_held_request_whose_client_left_is_dropped(make_bench):
    bench = await make_bench(reply())
    await bench.host.set_gate("holding")
    _, writer = await connect(bench, post(b"{}"))
    await bench.wait_until_held(1)
    writer.close()
    await bench.wait_until_held(0)
    await bench.host.set_gate("open")
    assert bench.engines[0].seen == []


async def test_a_closed_gate_refuses_before_the_body_is_there(make_bench):
    bench = await make_bench(reply())
    await bench.host.set_gate("closed", reason="update failed on e-0", phase="weights_onloaded")
    reader, writer = await connect(bench, post(b"x" * 100)[:-50])
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 2" in head
    assert b"update failed on e-0" in await reader.readuntil(b"}")
    writer.close()


async def test_a_second_attempt_waits_at_the_gate_like_any_other(make_bench):
    hold = Hold()

    async def die_when_told(connection, seen):
        await hold()
        await die_unanswered()(connection, seen)

    bench = await make_bench(die_when_told, reply())
    pending = bench.begin()
    await hold.entered.wait()
    await bench.host.set_gate("holding")
    hold.opened.set()
    await bench.wait_until_held(1)
    assert bench.engines[1].seen == []
    await bench.host.set_gate("open")
    assert (await pending).headers["x-engine-id"] == "e-1"


async def test_an_engine_taken_out_finishes_what_it_has_and_gets_no_more(make_bench):
    bench, hold, pending = await hold_one(make_bench, reply())
    await bench.host.set_members(2, [bench.member(0, state=BackendState.DRAINING), bench.member(1)])
    for _ in range(3):
        response = await bench.ask()
        assert response.headers["x-engine-id"] == "e-1"
    hold.opened.set()
    assert (await pending).headers["x-engine-id"] == "e-0"


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 3\r\nContent-Length: 4\r\n",
        b"Content-Length: +3\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
    ],
)
async def test_conflicting_framing_is_a_400_and_reaches_no_engine(make_bench, framing):
    bench = await make_bench(reply())
    head = (
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\n" + framing + b"\r\n3\r\nabc\r\n0\r\n\r\n"
    )
    assert (await response_to(bench, head)).startswith(b"HTTP/1.1 400")
    assert bench.engines[0].seen == []


async def test_a_client_that_waits_for_100_continue_gets_it(make_bench):
    bench = await make_bench(reply())
    head = post(b"{}", extra=b"Expect: 100-continue\r\nConnection: close\r\n").removesuffix(b"{}")
    reader, writer = await connect(bench, head)
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"{}")
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert bench.engines[0].seen[0].header("expect") == []


async def test_pipelined_requests_get_their_responses_in_order(make_bench):
    async def echo(connection, seen):
        await reply(seen.target.encode())(connection, seen)

    bench = await make_bench(echo)
    paths = [b"/v1/score", b"/v1/rerank", b"/v1/tokenize"]
    last = post(b"{}", b"/v1/responses", b"Connection: close\r\n")
    response = await response_to(bench, *(post(b"{}", path) for path in paths), last)
    assert [part.split(b"\r\n\r\n")[1] for part in response.split(b"HTTP/1.1 200 OK")[1:]] == [
        *paths,
        b"/v1/responses",
    ]


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("/v1/completions/", "the router has no path /v1/completions/; send it to /v1/completions"),
        ("/v1/load_lora_adapter", "the router has no path /v1/load_lora_adapter"),
        ("/v1/models/policy", "the router has no path /v1/models/policy"),
        ("/v1/%2e%2e/pause", "the router has no path /v1/../pause"),
        ("/v1/../release_memory_occupation", "no path /v1/../release_memory_occupation"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_path_that_is_not_known_reaches_no_engine(make_bench, method, target, why):
    bench = await make_bench(reply(), config=router_config(client_key="c", control_key="k"))
    begin = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ".encode()
    end = b"\r\nConnection: close\r\n\r\n"
    response = await response_to(bench, begin + b"c" + end)
    assert response.startswith(b"HTTP/1.1 404")
    error = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["message"][-len(why) :]) == ("not_found", why)
    assert (await response_to(bench, begin + b"wrong" + end)).startswith(b"HTTP/1.1 401")
    assert bench.engines[0].seen == []
