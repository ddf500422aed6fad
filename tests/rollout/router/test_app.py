"""What can be read over HTTP, and aborts."""

import asyncio

import pytest

from rollout.router import MemberState

from .stub_engine import Hold, hold_then_reply, reply


async def get(bench, path):
    answer = await bench.ask(path, "GET")
    return answer.status, answer.json, answer.headers


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


async def test_ready_says_why_no_engine_serves(make_bench):
    bench = await make_bench(reply())
    fenced = bench.member(0, state=MemberState.FENCED, because="wrong checksum")
    await bench.host.set_members(2, [fenced])
    status, body, _ = await get(bench, "/ready")
    assert (status, body["why"]) == (503, "e-0 is fenced (wrong checksum)")


async def test_engines_shows_state_load_and_failures_of_each(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold), reply())
    await bench.host.set_members(5, [bench.member(0), bench.member(1, state=MemberState.ASLEEP)])
    asked = bench.begin()
    await hold.entered.wait()
    _, body, _ = await get(bench, "/engines")
    assert (body["epoch"], body["num_in_flight"], body["gate"]["weight_version"]) == (5, 1, 7)
    shown = [
        (engine["engine_id"], engine["state"], engine["num_in_flight"], engine["num_failures"])
        for engine in body["engines"]
    ]
    assert shown == [("e-0", "serving", 1, 0), ("e-1", "asleep", 0, 0)]
    hold.opened.set()
    await asked


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info", "/v1/models"])
@pytest.mark.parametrize("state", ["open", "holding", "closed"])
async def test_model_info_is_an_engines_whatever_the_gate(make_bench, path, state):
    bench = await make_bench(reply(b'{"model_path": "m"}'))
    await bench.host.set_gate(state)
    status, body, headers = await get(bench, path)
    assert (status, body, headers["x-engine-id"]) == (200, {"model_path": "m"}, "e-0")


async def test_model_info_asks_another_engine_when_one_is_gone(make_bench):
    bench = await make_bench(None, reply(b"{}"))
    assert (await get(bench, "/model_info"))[2]["x-engine-id"] == "e-1"
    assert (await bench.host.stats())["engines"][0]["state"] == "serving"


async def test_model_info_without_an_engine_is_a_503_that_says_why(make_bench):
    bench = await make_bench()
    status, body, headers = await get(bench, "/model_info")
    assert (status, headers["retry-after"]) == (503, "2")
    assert "given no engines" in body["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/pause_generation", "/release_memory_occupation", "/flush_cache"]
)
async def test_an_engines_control_endpoints_cannot_be_reached(make_bench, path):
    bench = await make_bench(reply())
    assert (await bench.ask(path)).status == 404
    assert bench.engines[0].seen == []


async def abort(bench, **body):
    answer = await bench.ask("/abort_request", json=body)
    return answer.status, answer.json


async def test_an_abort_goes_to_the_engine_that_holds_the_rid_only(make_bench):
    holds = [Hold(), Hold()]
    bench = await make_bench(*(hold_then_reply(hold) for hold in holds))
    asked = [bench.begin(json={"rid": rid}) for rid in ("p-1", "p-10")]
    for hold in holds:
        await hold.entered.wait()
    holder = next(e for e in bench.engines if e.seen[0].json["rid"] == "p-10")
    for engine in bench.engines:
        engine.script = reply(b"")
    assert await abort(bench, rid="p-10") == (
        200,
        {"engines": [holder.engine_id], "num_held": 0, "failed": {}},
    )
    assert holder.seen[1].json == {"rid": "p-10"}
    assert sum(len(engine.seen) for engine in bench.engines) == 3
    for hold in holds:
        hold.opened.set()
    await asyncio.gather(*asked)


@pytest.mark.parametrize("body", [{"rid": "unknown"}, {"abort_all": True}])
async def test_an_abort_of_nobody_known_goes_to_all_that_may_hold_requests(make_bench, body):
    bench = await make_bench(reply(b""), reply(b""), reply(b""))
    await bench.host.set_members(
        2,
        [
            bench.member(0),
            bench.member(1, state=MemberState.DRAINING),
            bench.member(2, state=MemberState.ASLEEP),
        ],
    )
    assert (await abort(bench, **body))[1]["engines"] == ["e-0", "e-1"]
    assert [len(engine.seen) for engine in bench.engines] == [1, 1, 0]


async def test_an_abort_reaches_the_request_that_is_still_held(make_bench):
    bench = await make_bench(reply(b""))
    await bench.host.set_gate("holding")
    asked = bench.begin(json={"rid": "p-1"})
    await bench.wait_until_held(1)
    assert await abort(bench, rid="p-1") == (200, {"engines": [], "num_held": 1, "failed": {}})
    answer = await asked
    assert (answer.status, answer.json["error"]["type"]) == (499, "aborted")
    assert bench.engines[0].seen == []


async def test_an_abort_that_an_engine_did_not_take_names_it(make_bench):
    bench = await make_bench(reply(b""), None)
    status, body = await abort(bench, abort_all=True)
    assert (status, body["engines"], list(body["failed"])) == (502, ["e-0", "e-1"], ["e-1"])


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff"])
async def test_an_abort_that_is_no_json_object_is_a_400(make_bench, body):
    bench = await make_bench(reply())
    assert (await bench.ask("/abort_request", data=body)).status == 400
    assert bench.engines[0].seen == []
