"""What can be read over HTTP, and aborts."""

import asyncio

import pytest

from rollout.router import BackendState
from rollout.router.proxy import exchange, local_request

from .raw import connect, post, response_to
from .stub_engine import Hold, chunk, hold_then_reply, reply


async def get(bench, path):
    response = await bench.ask(path, "GET")
    return response.status, response.json, response.headers


@pytest.mark.parametrize("state", ["open", "holding", "closed"])
async def test_health_is_200_while_the_router_runs(make_bench, state):
    bench = await make_bench()
    await bench.host.set_gate(state)
    assert (await get(bench, "/health"))[0] == 200


async def test_ready_means_a_request_would_go_to_an_engine_now(make_bench):
    bench = await make_bench(reply())
    assert (await get(bench, "/ready"))[0] == 200
    await bench.host.set_gate("holding", phase="offloaded")
    status, body, headers = await get(bench, "/ready")
    assert (status, body["state"], body["phase"]) == (503, "holding", "offloaded")
    assert headers["retry-after"] == "2"


async def test_ready_reports_why_no_engine_serves(make_bench):
    bench = await make_bench(reply())
    fenced = bench.member(0, state=BackendState.FENCED, reason="wrong checksum")
    await bench.host.set_members(2, [fenced])
    status, body, _ = await get(bench, "/ready")
    assert (status, body["why"]) == (503, "e-0 is fenced (wrong checksum)")


async def test_engines_shows_state_load_and_failures_of_each(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold), reply())
    await bench.host.set_members(5, [bench.member(0), bench.member(1, state=BackendState.ASLEEP)])
    pending = bench.begin()
    await hold.entered.wait()
    _, body, _ = await get(bench, "/engines")
    assert (body["epoch"], body["num_in_flight"], body["gate"]["weight_version"]) == (5, 1, 7)
    shown = [
        (engine["engine_id"], engine["state"], engine["num_in_flight"], engine["num_failures"])
        for engine in body["engines"]
    ]
    assert shown == [("e-0", "serving", 1, 0), ("e-1", "asleep", 0, 0)]
    hold.opened.set()
    await pending


async def test_workers_are_the_engines_in_the_form_of_sglangs_gateway(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold), reply())
    await bench.host.set_members(5, [bench.member(0), bench.member(1, state=BackendState.ASLEEP)])
    pending = bench.begin()
    await hold.entered.wait()
    status, body, _ = await get(bench, "/workers")
    urls = [engine["url"] for engine in (await get(bench, "/engines"))[1]["engines"]]
    common = {"model_id": "unknown", "worker_type": "regular", "connection_mode": "http"}
    first = {"id": "e-0", "url": urls[0], "is_healthy": True, "load": 1, **common}
    second = {"id": "e-1", "url": urls[1], "is_healthy": False, "load": 0, **common}
    assert (status, body) == (200, {"workers": [first, second], "total": 2})
    assert (await get(bench, "/workers/e-1"))[:2] == (200, second)
    assert (await get(bench, "/workers/e-2"))[0] == 404
    hold.opened.set()
    await pending


async def test_workers_are_neither_added_nor_removed(make_bench):
    bench = await make_bench(reply())
    (worker,) = (await get(bench, "/workers"))[1]["workers"]
    for url in (worker["url"], worker["url"] + "/"):  # what registers itself is here already
        known = await bench.ask("/workers", json={"url": url, "worker_type": "regular"})
        accepted = {"status": "accepted", "worker_id": "e-0", "url": worker["url"]}
        assert (known.status, known.json) == (200, accepted)
    for url in ("http://127.0.0.1:1", 7, ""):
        other = await bench.ask("/workers", json={"url": url})
        assert other.status == 409
        assert "engine.urls" in other.json["error"]["message"]
    assert (await bench.ask("/workers", json=["url"])).status == 400
    gone = await bench.ask("/workers/e-0", "DELETE")
    assert (gone.status, gone.json["error"]["type"]) == (409, "conflict")
    assert (await get(bench, "/workers"))[1]["workers"] == [worker]
    assert bench.engines[0].seen == []


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info", "/v1/models"])
@pytest.mark.parametrize("state", ["open", "holding", "closed"])
async def test_model_info_is_an_engines_whatever_the_gate(make_bench, path, state):
    bench = await make_bench(reply(b'{"model_path": "m"}'))
    await bench.host.set_gate(state)
    status, body, headers = await get(bench, path)
    assert (status, body, headers["x-engine-id"]) == (200, {"model_path": "m"}, "e-0")


async def test_model_info_comes_from_another_engine_when_one_is_gone(make_bench):
    bench = await make_bench(None, reply(b"{}"))
    assert (await get(bench, "/model_info"))[2]["x-engine-id"] == "e-1"
    assert (await bench.host.stats())["engines"][0]["state"] == "serving"


async def test_model_info_without_an_engine_is_a_503_with_the_reason(make_bench):
    bench = await make_bench()
    status, body, headers = await get(bench, "/model_info")
    assert (status, headers["retry-after"]) == (503, "2")
    assert "has no engines" in body["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/pause_generation", "/release_memory_occupation", "/flush_cache"]
)
async def test_an_engines_control_endpoints_cannot_be_reached(make_bench, path):
    bench = await make_bench(reply())
    assert (await bench.ask(path)).status == 404
    assert bench.engines[0].seen == []


async def abort(bench, **body):
    response = await bench.ask("/abort_request", json=body)
    return response.status, response.json


def outcome(engines=(), num_held=0, num_on_engines=0):
    found = {"num_held": num_held, "num_on_engines": num_on_engines}
    return 200, {"engines": list(engines), **found, "failed": {}}


async def on_engines(bench, holds, *bodies):
    """A request on each engine, and the ids that the engines know them by."""
    pending = []
    for body, hold in zip(bodies, holds, strict=True):
        pending.append(bench.begin(json=body))
        await hold.entered.wait()
    sent = [engine.seen[0].json["rid"] for engine in bench.engines]
    for engine in bench.engines:
        engine.script = reply(b"")
    return pending, sent


@pytest.mark.parametrize("order", [{"rid": "p-1"}, {"rid": ["p-1", "x"]}, {"rid_prefix": "p-"}])
async def test_an_abort_ends_what_it_names_and_no_other(make_bench, order):
    holds = [Hold(), Hold()]
    bench = await make_bench(*(hold_then_reply(hold) for hold in holds))
    is_of_both = "rid_prefix" in order
    pending, sent = await on_engines(bench, holds, {"rid": "p-1"}, {"rid": "p-10"})
    engines = ["e-0", "e-1"][: 1 + is_of_both]
    assert await abort(bench, **order) == outcome(engines, 0, len(engines))
    assert [seen.json for seen in bench.engines[0].seen[1:]] == [{"rid": sent[0]}]
    assert [seen.json for seen in bench.engines[1].seen[1:]] == [{"rid": sent[1]}] * is_of_both
    for hold in holds[len(engines) :]:
        hold.opened.set()
    assert [(await response).status for response in pending] == [499, 499 if is_of_both else 200]


async def test_an_aborted_request_ends_also_where_its_engine_does_nothing(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    pending, _ = await on_engines(bench, [hold], {"rid": "p-1"})
    await abort(bench, rid="p-1")
    response = await asyncio.wait_for(pending[0], 5)
    assert (response.status, response.json["error"]["type"]) == (499, "aborted")
    await asyncio.wait_for(bench.engines[0].peer_closed.wait(), 5)


async def test_the_id_that_an_engine_shows_names_its_request_too(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    pending, sent = await on_engines(bench, [hold], {"rid": "p-1"})
    assert await abort(bench, rid=sent[0]) == outcome(["e-0"], 0, 1)
    assert (await pending[0]).status == 499


async def test_an_abort_of_one_prompt_of_a_request_leaves_the_others(make_bench, monkeypatch):
    monkeypatch.setattr(exchange, "_ABORTED_WITHIN_S", 0.0)
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    body = {"input_ids": [[1], [2]], "rid": ["a", "b"]}
    pending, (sent,) = await on_engines(bench, [hold], body)
    assert await abort(bench, rid="b") == outcome(["e-0"], 0, 1)
    assert bench.engines[0].seen[1].json == {"rid": sent[1]}
    for _ in range(10):  # turns of the loop, in which a deadline would pass
        await asyncio.sleep(0)
    assert not pending[0].done()
    hold.opened.set()
    assert (await pending[0]).status == 200


async def test_an_abort_of_one_prompt_that_its_engine_does_not_take_is_a_502(make_bench):
    """The router cannot end it: the rest of its request goes on, on the same connection."""
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    body = {"input_ids": [[1], [2]], "rid": ["a", "b"]}
    pending, _ = await on_engines(bench, [hold], body)
    bench.engines[0].script = reply(b"", "500 Internal Server Error")
    status, found = await abort(bench, rid="b")
    assert (status, found["failed"]) == (502, {"e-0": "HTTP 500"})
    hold.opened.set()
    assert (await pending[0]).status == 200


async def test_an_abort_of_an_unknown_rid_reaches_no_engine(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    pending, sent = await on_engines(bench, [hold], {"rid": "p-1"})
    for rid in ("p", "p-", "p-11", sent[0][:8], "unknown"):
        assert await abort(bench, rid=rid) == outcome()
    assert len(bench.engines[0].seen) == 1
    hold.opened.set()
    assert (await pending[0]).status == 200


async def test_an_empty_id_names_no_request(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    pending = bench.begin("/v1/embeddings", json={"input": "a"})  # it has no id
    await hold.entered.wait()
    for order in ({"rid": ""}, {"rid": [""]}, {"rid_prefix": ""}, {}):
        assert await abort(bench, **order) == outcome()
    hold.opened.set()
    assert (await pending).status == 200


async def test_an_abort_of_all_goes_to_all_engines_that_may_hold_requests(make_bench):
    bench = await make_bench(reply(b""), reply(b""), reply(b""))
    await bench.host.set_members(
        2,
        [
            bench.member(0),
            bench.member(1, state=BackendState.DRAINING),
            bench.member(2, state=BackendState.ASLEEP),
        ],
    )
    assert (await abort(bench, abort_all=True))[1]["engines"] == ["e-0", "e-1"]
    assert [len(engine.seen) for engine in bench.engines] == [1, 1, 0]
    assert bench.engines[0].seen[0].json == {"abort_all": True}


async def test_an_abort_reaches_the_request_that_is_still_held(make_bench):
    bench = await make_bench(reply(b""))
    await bench.host.set_gate("holding")
    pending = bench.begin(json={"rid": "p-1"})
    await bench.wait_until_held(1)
    assert await abort(bench, rid="p-") == outcome()
    assert await abort(bench, rid="p-1") == outcome(num_held=1)
    response = await pending
    assert (response.status, response.json["error"]["type"]) == (499, "aborted")
    assert bench.engines[0].seen == []


@pytest.mark.parametrize("rid", ["job", "job/1", "jobs/1", "my/job/1"])
async def test_a_key_names_only_ids_that_go_on_behind_its_end(make_bench, rid):
    bench = await make_bench(reply())
    await bench.host.set_gate("holding")
    pending = bench.begin(json={"rid": rid})
    await bench.wait_until_held(1)
    num_named = int(rid == "job/1")
    assert await abort(bench, rid_prefix="job/") == outcome(num_held=num_named)
    await bench.host.set_gate("open", weight_version=7)
    assert (await pending).status == (499 if num_named else 200)


async def test_a_key_without_an_end_is_a_400_that_says_what_works(make_bench):
    """The key r-1 would end the requests r-10 of anybody."""
    bench = await make_bench(reply())
    status, body = await abort(bench, rid_prefix="r-1")
    assert status == 400
    assert "'r-1' ends with a letter or a digit" in body["error"]["message"]
    assert bench.engines[0].seen == []


async def test_an_abort_of_a_request_that_has_ended_reaches_no_engine(make_bench):
    bench = await make_bench(reply())
    assert (await bench.ask(json={"rid": "r-1"})).status == 200
    assert await abort(bench, rid="r-1") == outcome()
    assert len(bench.engines[0].seen) == 1


async def test_where_the_call_to_the_engine_fails_a_closed_connection_ends_the_request(make_bench):
    """So the client's reply says no more than the engine knows."""
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    (engine,) = bench.engines
    pending = bench.begin(json={"rid": "r-1"})
    await hold.entered.wait()
    engine.script = reply(b"", "500 Internal Server Error")
    began_s = asyncio.get_running_loop().time()
    status, body = await abort(bench, rid="r-1")
    assert (status, body["failed"]) == (200, {"e-0": "HTTP 500"})
    engine.peer_closed.clear()
    assert (await pending).status == 499
    await engine.peer_closed.wait()
    assert asyncio.get_running_loop().time() - began_s < 5.0


async def test_an_abort_that_an_engine_did_not_take_names_it(make_bench):
    bench = await make_bench(reply(b""), None)
    status, body = await abort(bench, abort_all=True)
    assert (status, body["engines"], list(body["failed"])) == (502, ["e-0", "e-1"], ["e-1"])


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff"])
async def test_an_abort_that_is_no_json_object_is_a_400(make_bench, body):
    bench = await make_bench(reply())
    assert (await bench.ask("/abort_request", data=body)).status == 400
    assert bench.engines[0].seen == []


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info", "/v1/models"])
@pytest.mark.parametrize("host", [b"x/flush_cache?", b"x#", b"x@y", b"x"])
async def test_the_host_header_chooses_no_endpoint_of_an_engine(make_bench, path, host):
    bench = await make_bench(reply())
    head = b"GET %s?a=/flush_cache HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n"
    await response_to(bench, head % (path.encode(), host))
    assert {seen.target for seen in bench.engines[0].seen} <= {path}


LONG = b'{"rid": "%s"}' % (b"x" * (2 << 20))


@pytest.mark.parametrize("path", [b"/abort_request", b"/figures", b"/engines", b"/nowhere"])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_long_body_for_the_router_is_refused_before_it_is_read(
    make_bench, path, is_chunked
):
    bench = await make_bench(reply(b""))
    message = post(LONG, path)
    if is_chunked:
        head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % path
        message = head + chunk(LONG) + b"0\r\n\r\n"
    assert (await response_to(bench, message)).startswith(b"HTTP/1.1 413")
    assert bench.engines[0].seen == []


async def test_a_body_for_the_router_has_a_deadline(make_bench, monkeypatch):
    monkeypatch.setattr(local_request, "READ_WITHIN_S", 0.2)
    bench = await make_bench(reply(b""))
    whole = await asyncio.wait_for(response_to(bench, post(b"{}", b"/abort_request")[:-1]), 5)
    assert whole.startswith(b"HTTP/1.1 408")
    assert bench.engines[0].seen == []


async def test_a_client_that_waits_for_continue_gets_it_from_the_router_too(make_bench):
    bench = await make_bench(reply(b""))
    extra = b"Expect: 100-continue\r\nConnection: close\r\n"
    message = post(b'{"rid": "a"}', b"/abort_request", extra)
    reader, writer = await connect(bench, message[:-12])
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(message[-12:])
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    writer.close()


SAMPLE = (
    b'{"prompt": "hi", "reply": "hello", "reward": 0.5, "tokens": 1, "engines": ["main-0"], '
    b'"versions": [3], "status": ""}'
)


@pytest.mark.parametrize(
    "report",
    [
        b'{"step": 1, "metrics": {"a": 1%s}}' % (b"0" * 400),
        b'{"step": 1, "metrics": {"a": -1%s}}' % (b"0" * 400),
        b'{"step": 1%s, "metrics": {}}' % (b"0" * 400),
        b'{"step": 1, "metrics": {"a": NaN}}',
        b'{"step": 1, "metrics": {"a": -Infinity}}',
        b'{"step": 1, "metrics": {"a": 1e999}}',
        b'{"step": true, "metrics": {}}',
        b'{"step": 1, "metrics": []}',
        b"[" * 100_000,
        b"[1]",
        b'{"step": 1, "samples": [{"prompt": 1}]}',
        b'{"step": 1, "samples": [%s]}' % b",".join([SAMPLE] * 17),
        b'{"step": 1, "samples": [%s]}' % SAMPLE.replace(b"0.5", b"NaN"),
        b'{"step": 1, "samples": [%s]}' % SAMPLE.replace(b"hello", b"x" * 5000),
    ],
)
async def test_step_metrics_that_are_no_numbers_are_a_400(make_bench, report):
    bench = await make_bench()
    assert (await bench.ask("/figures", data=report)).status == 400
    assert (await bench.host.stats())["figures"] == []


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"rid": [1]}', b'{"rid": 5}'])
async def test_an_abort_of_what_is_no_rid_is_a_400(make_bench, body):
    bench = await make_bench(reply())
    assert (await bench.ask("/abort_request", data=body)).status == 400
    assert bench.engines[0].seen == []
