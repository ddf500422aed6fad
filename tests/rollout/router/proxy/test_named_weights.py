"""A request gets the version of an adapter that is published when it begins, and keeps it."""

import asyncio
import json

import aiohttp
import pytest

from engines.protocol import WorkerType
from rollout.router import RouterHost, pins
from rollout.rules.routing import JUST_STARTED
from tests.rollout.router.conftest import router_config
from tests.rollout.router.counting_engine import ASK, counting
from tests.rollout.router.stub_engine import reply, stream

TABLE = {"": "policy@8", "policy": "policy@8", "judge": "judge@5"}
LORA = {"weight_version": 8, "base_version": 3, "adapters": TABLE}
BASE = {"lora_path": None}
FAILS_OVER = {"x-token-failover": "on"}
JSON = ("Content-Type: application/json",)


async def open_gate(bench, **more):
    await bench.host.set_gate("open", **LORA | more)


def meta(version, end=2, **more):
    spans = [{"version": version, "start": 0, "end": end}]
    return {"meta_info": {"weight_version": version, "weight_versions": spans, **more}}


def as_json(payload, status="200 OK"):
    return reply(json.dumps(payload).encode(), status, JSON)


def as_events(*payloads):
    return stream(*(b"data: %s\n\n" % json.dumps(one).encode() for one in payloads), DONE)


DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "path",
    ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/classify"],
)
async def test_a_request_without_a_name_gets_that_of_the_adapter(make_bench, path):
    bench = await make_bench(reply(b"as it is"))
    await open_gate(bench)
    got = await bench.ask(path, data=b' {"input_ids": [1,  2]}')
    (seen,) = bench.engines[0].seen
    assert seen.json["lora_path"] == "policy@8"
    assert b'"input_ids": [1,  2]' in seen.body  # it was not parsed
    assert (got.body, got.headers["x-weight-version"]) == (b"as it is", "8")


@pytest.mark.parametrize("gate", [{}, {"adapters": {}, "base_version": 8}])
async def test_without_an_adapter_nothing_is_named(make_bench, gate):
    bench = await make_bench(reply())
    await bench.host.set_gate("open", weight_version=8, **gate)
    await bench.ask()
    assert "lora_path" not in bench.engines[0].seen[0].json


async def test_a_server_without_adapters_passes_on_names_and_replies_as_they_are(make_bench):
    body = b'{"meta_info":  {"weight_version": "8"}}'
    bench = await make_bench(reply(body, headers=JSON))
    for named in (None, "mine", ["mine", None]):
        got = await bench.ask("/v1/responses", json={"lora_path": named})
        assert bench.engines[0].seen[-1].json["lora_path"] == named
        assert got.body == body


async def test_a_name_in_a_prompt_is_none(make_bench):
    bench = await make_bench(reply())
    await open_gate(bench)
    for body in ({"text": '"lora_path"'}, {"text": "x", "custom": {"lora_path": None}}):
        await bench.ask(json=body)
        assert bench.engines[0].seen[-1].json["lora_path"] == "policy@8"


@pytest.mark.parametrize(
    ("name", "sent", "version"),
    [
        ("policy", "policy@8", "8"),
        ("judge", "judge@5", "5"),
        ("policy@6", "policy@6", "6"),
        ("mine", "mine", "3"),
    ],
)
async def test_each_adapter_has_its_own_version(make_bench, name, sent, version):
    bench = await make_bench(as_json(meta("3")))
    await open_gate(bench)
    got = await bench.ask(json={"lora_path": name})
    (seen,) = bench.engines[0].seen
    assert (seen.json["lora_path"], seen.json["extra_key"]) == (sent, f"run:v{version}")
    assert got.json == meta(version)
    assert got.headers["x-weight-version"] == version


async def test_an_adapter_over_a_newer_base_has_the_version_of_that(make_bench):
    bench = await make_bench(as_json(meta("9")))
    await open_gate(bench, weight_version=9, base_version=9)
    got = await bench.ask(json={"input_ids": [1]})
    assert (got.json, got.headers["x-weight-version"]) == (meta("9"), "9")


@pytest.mark.parametrize("base", [None, ""])
async def test_replies_of_the_base_have_its_version(make_bench, base):
    bench = await make_bench(as_json({"text": "x", **meta("3", id="r")}))
    await open_gate(bench)
    got = await bench.ask(json={"input_ids": [1], "lora_path": base})
    (seen,) = bench.engines[0].seen
    assert (seen.json["lora_path"], seen.json["extra_key"]) == (base, "run:v3")
    assert seen.body.count(b"lora_path") == 1
    assert got.json == {"text": "x", **meta("3", id="r")}
    assert got.headers["x-weight-version"] == "3"


async def test_streams_of_an_adapter_have_its_version(make_bench):
    bench = await make_bench(as_events(meta("3", end=1), meta("3")))
    await open_gate(bench)
    got = await bench.ask(json={"input_ids": [1], "stream": True})
    lines = [line for line in got.body.split(b"\n\n") if line]
    events, done = [json.loads(line[5:]) for line in lines[:-1]], lines[-1]
    assert (events, done) == ([meta("8", end=1), meta("8")], b"data: [DONE]")
    assert got.headers["x-weight-version"] == "8"


async def test_openai_replies_of_an_adapter_have_its_version(make_bench):
    def payload(version):
        (info,) = meta(version).values()
        return {"choices": [{"meta_info": dict(info)}], "metadata": info}

    bench = await make_bench(as_json(payload("3")))
    await open_gate(bench)
    got = await bench.ask("/v1/chat/completions", json={"model": "m", "messages": []})
    assert got.json == payload("8")


@pytest.mark.parametrize("num_each", [1, 2])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_each_reply_of_a_list_has_the_version_of_its_own_weights(
    make_bench, is_streamed, num_each
):
    names = [None, "policy", "", "judge"]
    replies = [meta("3") for _ in range(4 * num_each)]
    numbered = [{**one, "index": index} for index, one in enumerate(replies)][::-1]
    bench = await make_bench(as_events(*numbered) if is_streamed else as_json(replies))
    await open_gate(bench)
    body = {"input_ids": [[1]] * 4, "lora_path": names, "stream": is_streamed}
    got = await bench.ask(json={**body, "sampling_params": {"n": num_each}})
    assert bench.engines[0].seen[0].json["lora_path"] == [None, "policy@8", None, "judge@5"]
    if is_streamed:
        lines = [line[5:] for line in got.body.split(b"\n\n") if line]
        found = sorted(map(json.loads, lines[:-1]), key=lambda event: event["index"])
    else:
        found = got.json
    versions = [one["meta_info"]["weight_version"] for one in found]
    assert versions == [one for one in "3835" for _ in range(num_each)]
    assert got.headers["x-weight-version"] == "8"


@pytest.mark.parametrize("named", [{}, BASE, {"lora_path": "policy"}])
async def test_a_request_whose_engine_died_keeps_its_weights(make_bench, named):
    bench = await make_bench(counting(dies_after=7, version="3"), counting(version="3"))
    await open_gate(bench)
    got = (await bench.ask(json={**ASK, **named}, headers=FAILS_OVER)).json
    version, name = ("3", None) if named == BASE else ("8", "policy@8")
    assert got["meta_info"]["num_failovers"] == 1
    assert got["output_ids"] == list(range(3, 23))
    assert {span["version"] for span in got["meta_info"]["weight_versions"]} == {version}
    assert got["meta_info"]["weight_version"] == version
    seen = [engine.seen[0].json for engine in bench.engines]
    assert [one["lora_path"] for one in seen] == [name, name]


async def test_a_request_of_the_base_starts_over_if_its_engine_died(make_bench):
    bench = await make_bench(None, as_json(meta("3")))
    await open_gate(bench)
    got = await bench.ask(json={"input_ids": [[1], [2]], **BASE})
    assert (got.status, got.json) == (200, meta("3"))


async def test_held_requests_get_the_weights_of_the_opened_gate(make_bench):
    bench = await make_bench(as_json(meta("8")))
    await open_gate(bench, adapters={}, base_version=8)  # before the first adapter
    await bench.host.set_gate("holding", phase="paused")
    pending = bench.begin(json={"input_ids": [1]})
    of_base = bench.begin(json={"input_ids": [2], **BASE})
    await bench.wait_until_held(2)
    table = {"": "policy@9", "policy": "policy@9"}
    await open_gate(bench, weight_version=9, base_version=8, adapters=table)
    assert ((await pending).json, (await of_base).json) == (meta("9"), meta("8"))
    names = {seen.json["input_ids"][0]: seen.json["lora_path"] for seen in bench.engines[0].seen}
    assert names == {1: "policy@9", 2: None}


@pytest.mark.parametrize("before", [None, "policy@1"])
async def test_a_request_that_continues_keeps_the_weights_that_it_began_with(make_bench, before):
    async def paused_once(connection, seen):
        if len(bench.engines[0].seen) > 1:
            return await counting(version="0")(connection, seen)
        await bench.host.set_gate("holding", phase="paused")
        return await counting(aborts_after=6, version="0")(connection, seen)

    def opened(version, name):
        weights = {"weight_version": version, "base_version": 0}
        return bench.host.set_gate("open", **weights, adapters={"": name} if name else {})

    bench = await make_bench(paused_once)
    await opened(1, before)
    pending = bench.begin(json=ASK, headers=FAILS_OVER)
    await bench.wait_until_held(1)
    assert await bench.host.pinned() == ({before: 1} if before else {})
    await opened(2, "policy@2")
    spans = (await pending).json["meta_info"]["weight_versions"]
    version = "1" if before else "0"
    assert {span["version"] for span in spans} == {version}
    assert [span["end"] for span in spans][-1] == 20
    assert [seen.json.get("lora_path") for seen in bench.engines[0].seen] == [before, before]
    assert await bench.host.pinned() == {}


async def test_a_version_is_unpinned_when_its_last_request_has_ended(make_bench):
    ending = asyncio.Event()

    async def waits(connection, seen):
        await ending.wait()
        return await as_json(meta("3"))(connection, seen)

    bench = await make_bench(waits)
    await open_gate(bench)
    pending = [bench.begin(json={"input_ids": [1]}) for _ in range(2)]
    while len(bench.engines[0].seen) < 2:
        await bench.host.stats()
    assert await bench.host.unpinned("judge@5", 5.0)
    assert not await bench.host.unpinned("policy@8", 0.01)
    waiting = asyncio.ensure_future(bench.host.unpinned("policy@8", 10.0))
    ending.set()
    await asyncio.gather(*pending)
    assert await waiting


@pytest.mark.parametrize(
    ("wanted", "name"), [("", "policy@8"), ("judge", "judge@5"), ("judge@4", "judge@4")]
)
async def test_a_pin_keeps_a_version_until_its_client_deletes_it(make_bench, wanted, name):
    """Adapters are pushed meanwhile, and requests that name the version get it."""
    bench = await make_bench(as_json(meta("8")))
    await open_gate(bench)
    async with bench.client.post("/pins", json={"lora_path": wanted}) as pin:
        line = json.loads(await pin.content.readline())
        pin_id = line.pop("pin_id")
        assert line == {"lora_path": name, "is_pinned": True}
        assert await bench.host.pinned() == {name: 1}
        await open_gate(bench, weight_version=9, adapters={"": "policy@9", "judge": "judge@9"})
        await bench.ask(json={**ASK, "lora_path": name})
        assert bench.engines[0].seen[-1].json["lora_path"] == name
        assert not await bench.host.unpinned(name, 0.01)
        assert (await bench.ask(f"/pins/{pin_id}", "DELETE")).status == 200
        assert await bench.host.unpinned(name, 10.0)
        assert await pin.content.read() == b""
    assert (await bench.ask(f"/pins/{pin_id}", "DELETE")).status == 404


async def pinned(bench, name="policy@8"):
    """A pin's id, whose client is lost."""
    async with bench.client.post("/pins", json={"lora_path": name}) as pin:
        return json.loads(await pin.content.readline())["pin_id"]


async def test_a_pin_whose_client_was_lost_stays_for_its_next_process(make_bench, monkeypatch):
    bench = await make_bench(reply())
    await open_gate(bench)
    pin_id = await pinned(bench)
    assert await bench.host.pinned() == {"policy@8": 1}
    assert (await bench.ask(f"/pins/{pin_id}", "DELETE")).status == 200
    assert await bench.host.pinned() == {}
    monkeypatch.setattr(pins, "LINGERS_S", 0.01)
    await pinned(bench)
    assert await bench.host.unpinned("policy@8", 10.0)


async def test_so_many_pins_stay_without_a_client(make_bench, monkeypatch):
    monkeypatch.setattr(pins, "MOST_LEFT", 2)
    bench = await make_bench(reply())
    await open_gate(bench)
    for _ in range(5):
        await pinned(bench)
    while await bench.host.pinned() != {"policy@8": 2}:
        pass


async def test_a_router_that_has_just_started_pins_nothing():
    """It does not know which version answers."""
    host = RouterHost(router_config())
    url = (await host.start()).url
    try:
        async with (
            aiohttp.ClientSession(url) as client,
            client.post("/pins", json={"lora_path": "policy"}) as pin,
        ):
            assert (pin.status, pin.headers["retry-after"]) == (503, "2")
            assert JUST_STARTED in await pin.text()
    finally:
        await host.stop(0.0)


async def test_a_router_in_the_place_of_a_lost_one_waits_for_its_pins(make_bench, monkeypatch):
    monkeypatch.setattr("rollout.router.host.LINGERS_S", 0.3)
    bench = await make_bench(reply())
    await bench.host.begin_as(None, "open", {"weight_version": 8})
    assert not await bench.host.unpinned("policy@7", 0.01)
    assert await bench.host.unpinned("policy@7", 10.0)


@pytest.mark.parametrize(("wanted", "name"), [("", None), ("theirs", "theirs")])
async def test_what_has_no_further_versions_is_not_pinned(make_bench, wanted, name):
    bench = await make_bench(reply())
    await open_gate(bench, adapters={"judge": "judge@5"})
    got = await bench.ask("/pins", json={"lora_path": wanted})
    assert got.json == {"lora_path": name, "is_pinned": False}
    assert await bench.host.pinned() == {}


@pytest.mark.parametrize("body", [{}, [], {"lora_path": None}, {"lora_path": "a" * 257}])
async def test_a_pin_of_no_name_is_refused(make_bench, body):
    bench = await make_bench(reply())
    assert (await bench.ask("/pins", json=body)).status == 400


async def test_prefill_and_decode_engines_get_the_same_name(make_bench):
    bench = await make_bench(reply(b"prefill"), reply(b"decode"))
    types = (WorkerType.PREFILL, WorkerType.DECODE)
    members = [bench.member(index, worker_type=one) for index, one in enumerate(types)]
    await bench.host.set_members(2, members)
    await open_gate(bench)
    await bench.ask()
    while not bench.engines[0].seen:
        await bench.host.stats()
    seen = [engine.seen[0].json for engine in bench.engines]
    assert seen[0] == seen[1]
    assert (seen[0]["lora_path"], seen[0]["bootstrap_host"]) == ("policy@8", "127.0.0.1")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/responses", {"input": "x"}, "/v1/responses takes no lora_path"),
        ("/vertex_generate", {"instances": []}, "the base would answer"),
        (
            "/v1/completions",
            {"prompt": ["a", "b"], "lora_path": ["judge", "x"]},
            "one weight version",
        ),
        ("/v1/chat/completions", {"model": "m:policy", **BASE}, "'m:policy' may name an adapter"),
        ("/generate", {"input_ids": [1] * 2000, **BASE}, "at most 1024 bytes"),
    ],
)
async def test_what_cannot_be_answered_rightly_is_refused(make_bench, path, body, words):
    bench = await make_bench(reply(), config=router_config(max_read_bytes=1024))
    await open_gate(bench)
    got = await bench.ask(path, json=body)
    assert got.status == 400
    assert words in got.json["error"]["message"]
    assert bench.engines[0].seen == []


async def test_tokenizers_need_no_weights(make_bench):
    bench = await make_bench(reply())
    await open_gate(bench)
    await bench.ask("/tokenize", json={"prompt": "x"})
    assert bench.engines[0].seen[0].json == {"prompt": "x"}


@pytest.mark.parametrize("odd", [b"[1, 2]", b'{"index": "x"}', b'{"index": 7}', b"not JSON"])
async def test_an_odd_reply_to_a_list_ends_its_request_alone(make_bench, odd):
    bench = await make_bench(reply(odd, headers=JSON))
    await open_gate(bench)
    got = await bench.ask(json={"input_ids": [[1], [2]], "lora_path": [None, "policy"]})
    assert got.status == 502
    assert (await bench.host.stats())["num_unusable_replies"] == 1


async def test_an_engines_refusal_of_the_base_is_passed_on(make_bench):
    bench = await make_bench(as_json({"error": "no"}, "400 Bad Request"))
    await open_gate(bench)
    got = await bench.ask(json={"input_ids": [1], **BASE})
    assert (got.status, got.json) == (400, {"error": "no"})
