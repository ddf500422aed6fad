"""Token failover over sockets; the engines count up from the prompt's length."""

import asyncio
import io
import json
import random

import pytest

from rollout.router import BackendState
from rollout.router.proxy import exchange
from rollout.router.proxy.exchange import MAX_FAILOVERS
from tests.rollout.router.conftest import router_config
from tests.rollout.router.counting_engine import ASK, counting
from tests.rollout.router.raw import bodies, post, response_to
from tests.rollout.router.stub_engine import CHUNKED, Hold, chunk, reply, stream
from tests.support.chat_models import write_chat_model
from tests.support.waits import until

ON = router_config(token_failover="on")


def check(payload, failovers=None):
    meta = payload["meta_info"]
    assert payload["output_ids"] == list(range(3, 23))
    assert [entry[1] for entry in meta["output_token_logprobs"]] == payload["output_ids"]
    assert meta["finish_reason"] == {"type": "length", "length": 20}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 20)
    assert (meta["weight_versions"][0]["start"], meta["weight_versions"][-1]["end"]) == (0, 20)
    assert payload["text"] == "x" * 20
    if failovers is not None:
        assert meta["num_failovers"] == failovers


async def test_a_buffered_response_is_complete_though_its_engine_died(make_bench):
    bench = await make_bench(counting(dies_after=7), counting(version="2"), config=ON)
    got = await bench.ask(json=ASK)
    assert (got.status, got.headers["content-type"]) == (200, "application/json")
    assert got.headers["x-engine-id"] == "e-1"
    check(got.json, failovers=1)
    stats = await bench.host.stats()
    assert (stats["num_failovers"], stats["num_broken_replies"]) == (1, 0)
    assert stats["num_tokens_kept"] <= 7


async def events_of(response):
    events = [line for line in (await response.content.read()).split(b"\n\n") if line]
    assert events[-1] == b"data: [DONE]"
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]


async def test_a_stream_continues_after_its_engine_died(make_bench):
    bench = await make_bench(counting(dies_after=7), counting(version="2"), config=ON)
    async with bench.client.post("/generate", json={**ASK, "stream": True}) as response:
        events = await events_of(response)
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(lengths)
    check(events[-1], failovers=1)


async def test_what_counts_its_tokens_starts_over_or_ends_a_stream_with_the_reason(make_bench):
    engines = counting(dies_after=7), counting(version="2")
    sampling = ASK["sampling_params"] | {"frequency_penalty": 0.5}
    bench = await make_bench(*engines, config=ON)
    got = (await bench.ask(json=ASK | {"sampling_params": sampling})).json
    check(got, failovers=1)
    assert got["meta_info"]["weight_versions"] == [{"version": "2", "start": 0, "end": 20}]
    bench = await make_bench(*engines, config=ON)
    body = {**ASK, "stream": True, "sampling_params": sampling}
    async with bench.client.post("/generate", json=body) as response:
        events = (await response.content.read()).split(b"\n\n")
    *_, last, error = (json.loads(line[6:]) for line in events if line)
    assert last["output_ids"] == list(range(3, 3 + len(last["output_ids"])))
    assert error["error"]["type"] == "engine_failure"
    assert "not sent again: frequency_penalty counts the tokens" in error["error"]["message"]
    assert (await bench.host.stats())["num_failovers_refused"] == {"penalty": 1}


@pytest.mark.parametrize("has_tokenizer", [True, False])
async def test_several_tokens_of_an_event_are_kept_as_soon_as_the_tokenizer_is_loaded(
    make_bench, tmp_path, has_tokenizer
):
    """More than SGLang decodes at once: without the tokenizer, the last may have no text so far."""
    if has_tokenizer:
        pytest.importorskip("tokenizers")
        write_chat_model(tmp_path)
        (tmp_path / "tokenizer_config.json").unlink()  # a base model has no chat template
    config = router_config(token_failover="on", tokenizer_path=str(tmp_path))
    hold = Hold()
    bench = await make_bench(counting(every=8, dies_after=8, hold=hold), counting(), config=config)
    await bench.host.set_members(2, [bench.member(1)])
    check((await bench.ask(json=ASK)).json, failovers=0)
    await until(lambda: bench.host._proxy.decode is not None or not has_tokenizer)
    await bench.host.set_members(3, [bench.member(0)])
    pending = bench.begin(json=ASK)
    await hold.entered.wait()
    await bench.host.set_members(4, [bench.member(0), bench.member(1)])
    hold.opened.set()
    got = (await pending).json
    check(got, failovers=1)
    assert got["meta_info"]["num_recomputed_tokens"] == (0 if has_tokenizer else 8)


@pytest.mark.parametrize("images", ["a.png", ["a.png", "data:image/png;base64," + "A" * (3 << 20)]])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_images_go_to_every_engine_of_a_request(make_bench, images, is_streamed):
    bench = await make_bench(counting(dies_after=7), counting(version="2"), config=ON)
    asked = ASK | {"image_data": images, "stream": is_streamed}
    body = io.BytesIO(json.dumps(asked).encode())  # aiohttp warns of bytes over 1 MiB
    async with bench.client.post("/generate", data=body) as response:
        if is_streamed:
            payload = (await events_of(response))[-1]
        else:
            payload = await response.json()
    check(payload, failovers=1)
    first, second = (engine.seen[-1].json for engine in bench.engines)
    assert first["image_data"] == second["image_data"] == images
    assert second["input_ids"][:4] == [1, 2, 3, 3]  # the prompt with its images, then tokens


async def test_a_body_over_the_bound_is_forwarded_unread(make_bench):
    config = router_config(token_failover="on", max_read_bytes=1000)
    bench = await make_bench(reply(b"plain"), config=config)
    asked = ASK | {"image_data": "A" * 1000}
    assert (await bench.ask(json=asked)).body == b"plain"
    assert "stream" not in bench.engines[0].seen[0].json


async def test_images_of_a_batch_pass_as_they_are(make_bench):
    bench = await make_bench(reply(b"[]"), config=ON)
    asked = {"input_ids": [[1], [2]], "image_data": [["a.png", "b.png"], None]}
    assert (await bench.ask(json=asked)).status == 200
    seen = bench.engines[0].seen[-1].json
    assert (seen["input_ids"], seen["image_data"]) == ([[1], [2]], [["a.png", "b.png"], None])


async def test_a_header_switches_it_on(make_bench):
    bench = await make_bench(counting(dies_after=7), counting())
    got = await bench.ask(json=ASK, headers={"X-Token-Failover": "on"})
    check(got.json, failovers=1)
    assert "stream" not in ASK


async def test_when_it_is_off_a_header_changes_nothing(make_bench):
    bench = await make_bench(reply(b"plain"), config=router_config(token_failover="off"))
    got = await bench.ask(json=ASK, headers={"X-Token-Failover": "on"})
    assert got.body == b"plain"
    assert "stream" not in bench.engines[0].seen[0].json


async def test_requests_of_an_engine_pushed_as_fenced_continue_on_another(make_bench):
    hold = Hold()
    bench = await make_bench(counting(dies_after=5, hold=hold), counting(), config=ON)
    await bench.host.set_members(2, [bench.member(0)])
    pending = bench.begin(json=ASK)
    await hold.entered.wait()
    fenced = bench.member(0, state=BackendState.FENCED, reason="wrong checksum")
    await bench.host.set_members(3, [fenced, bench.member(1)])
    check((await pending).json, failovers=1)
    assert bench.failures == []


async def test_a_request_aborted_by_a_pause_continues_when_the_gate_opens(make_bench):
    paused = asyncio.Event()

    async def is_paused_once(connection, seen):
        if paused.is_set():
            return await counting(version="8")(connection, seen)
        await bench.host.set_gate("holding", phase="paused")
        paused.set()
        return await counting(aborts_after=6)(connection, seen)

    bench = await make_bench(is_paused_once, config=ON)
    pending = bench.begin(json=ASK)
    await bench.wait_until_held(1)
    assert (await bench.host.stats())["num_in_flight"] == 0
    await bench.host.set_gate("open", weight_version=8)
    got = (await pending).json
    check(got, failovers=1)
    assert [span["version"] for span in got["meta_info"]["weight_versions"]] == ["1", "8"]


CHAT = {"messages": [{"role": "user", "content": "q"}], "stream": True}


def said(text, finish=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: %s\n\n" % json.dumps({"id": "c", "choices": [choice]}).encode()


async def text_and_end(bench, hold=None):
    async with bench.client.post("/v1/chat/completions", json=CHAT) as response:
        begin = await response.content.readuntil(b'"a"') if hold is not None else b""
        if hold is not None:
            hold.opened.set()
        lines = (begin + await response.content.read()).split(b"\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    *_, last = events
    choices = [choice for event in events for choice in event.get("choices", [])]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    end = last["error"]["type"] if "error" in last else choices[-1]["finish_reason"]
    refused = (await bench.host.stats())["num_failovers_refused"]
    return text, end, refused


async def test_a_chat_without_ids_starts_over_while_its_client_has_no_text(make_bench):
    begun = stream(said(""), then_reset=True)
    bench = await make_bench(
        begun, stream(said("ab"), said("", "stop"), b"data: [DONE]\n\n"), config=ON
    )
    assert await text_and_end(bench) == ("ab", "stop", {})
    begun = stream(said("a", None), then_reset=True)
    bench = await make_bench(begun, stream(said("ab"), said("", "stop")), config=ON)
    assert await text_and_end(bench) == ("a", "engine_failure", {"chat_without_ids": 1})
    metrics = (await bench.ask("/metrics", "GET")).body.decode()
    assert 'router_failovers_refused_total{why="chat_without_ids"} 1.0' in metrics


async def test_a_pause_that_aborts_a_chat_without_ids_is_its_end_where_a_part_was_sent(make_bench):
    hold = Hold()
    begun = stream(said("a"), hold, said("", "abort"), b"data: [DONE]\n\n")
    bench = await make_bench(begun, begun, config=ON)
    assert await text_and_end(bench, hold) == ("a", "abort", {"chat_without_ids": 1})


async def test_a_requested_abort_is_the_end(make_bench):
    hold = Hold()

    async def aborts_when_told(connection, seen):
        if seen.target == "/abort_request":
            hold.opened.set()
            return await reply(b"")(connection, seen)
        await hold()
        return await counting(aborts_after=6)(connection, seen)

    bench = await make_bench(aborts_when_told, config=ON)
    pending = bench.begin(json={**ASK, "rid": "p-1"})
    await hold.entered.wait()
    await bench.ask("/abort_request", json={"rid": "p-1"})
    got = (await pending).json
    assert got["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(got["output_ids"]) == 6


@pytest.mark.parametrize("aborts_after", [1, 3])
async def test_an_engine_that_always_aborts_with_an_open_gate_is_not_queried_forever(
    make_bench, aborts_after
):
    bench = await make_bench(counting(aborts_after=aborts_after), config=ON)
    body = {"text": "x", "input_ids": None, "sampling_params": {"max_new_tokens": 20}}

    async def aborts(connection, seen):
        seen.body = seen.body.replace(b'"input_ids":null', b'"input_ids":[1,2,3]')
        await counting(aborts_after=aborts_after)(connection, seen)

    bench.engines[0].script = aborts
    got = await bench.ask(json=body)
    assert (got.status, got.json["meta_info"]["finish_reason"]["type"]) == (200, "abort")
    assert len(bench.engines[0].seen) == MAX_FAILOVERS + 1
    assert (await bench.host.stats())["engines"][0]["state"] == "serving"


async def test_an_engine_that_aborts_each_request_after_one_token_ends_it_at_the_last(make_bench):
    bench = await make_bench(counting(aborts_after=1), config=ON)
    got = await bench.ask(json={**ASK, "sampling_params": {"max_new_tokens": 4}})
    assert got.json["meta_info"]["finish_reason"]["type"] == "abort"
    assert got.json["output_ids"] == [3, 4, 5, 6]
    assert len(bench.engines[0].seen) <= 4 + MAX_FAILOVERS


async def test_an_engines_refusal_is_final_and_complete(make_bench):
    bench = await make_bench(reply(b'{"error": "no"}', "400 Bad Request"), config=ON)
    got = await bench.ask(json=ASK)
    assert (got.status, got.json) == (400, {"error": "no"})
    assert len(bench.engines[0].seen) == 1


async def test_an_error_in_the_stream_is_final(make_bench):
    async def errs(connection, seen):
        error = b'data: {"error": {"message": "bad", "code": 400}}\n\n'
        done = chunk(error + b"data: [DONE]\n\n") + b"0\r\n\r\n"
        await connection.send(CHUNKED % b"text/event-stream", done)

    bench = await make_bench(errs, config=ON)
    got = await bench.ask(json=ASK)
    assert (got.status, got.json["error"]["message"]) == (400, "bad")


async def test_a_batch_is_passed_on_as_it_is(make_bench):
    bench = await make_bench(reply(b"[]"), config=ON)
    assert (await bench.ask(json={"input_ids": [[1], [2]]})).body == b"[]"
    assert "stream" not in bench.engines[0].seen[0].json


async def test_no_other_engine_is_a_502(make_bench):
    bench = await make_bench(counting(dies_after=3), config=ON)
    got = await bench.ask(json=ASK)
    assert (got.status, got.json["error"]["engine"]) == (502, "e-0")


async def test_a_stream_without_another_engine_ends_with_an_error_event(make_bench):
    hold = Hold()
    bench = await make_bench(counting(dies_after=3, hold=hold), config=ON)
    async with bench.client.post("/generate", json={**ASK, "stream": True}) as response:
        await response.content.readany()
        hold.opened.set()
        assert b'"engine": "e-0"' in await response.content.read()


async def test_a_client_that_leaves_ends_the_work(make_bench):
    hold = Hold()
    bench = await make_bench(counting(dies_after=3, hold=hold), counting(), config=ON)
    await bench.host.set_members(2, [bench.member(0)])
    pending = bench.begin(json=ASK)
    await hold.entered.wait()
    pending.cancel()
    await bench.host.drained(2)
    hold.opened.set()
    assert bench.failures == []


async def test_random_failures_of_engines_that_come_back_lose_nothing(make_bench, monkeypatch):
    """Three engines die for some requests and are verified again; a fourth never dies."""
    rng = random.Random(11)

    async def sometimes_dies(connection, seen):
        dies_after = rng.choice([None, None, 1, 2, 5, 9, 19])
        await counting(dies_after=dies_after, version=str(rng.randrange(3)))(connection, seen)

    monkeypatch.setattr(exchange, "MAX_FAILOVERS", 100)
    config = router_config(token_failover="on")
    bench = await make_bench(*[sometimes_dies] * 3, counting(), config=config)
    is_finished = False

    async def recover():
        epoch = 2
        while not is_finished:
            await bench.host.set_members(epoch, [bench.member(index) for index in range(4)])
            epoch += 1

    recovering = asyncio.ensure_future(recover())
    pending = [
        bench.begin(json={**ASK, "stream": True} if number % 2 else ASK) for number in range(60)
    ]
    responses = await asyncio.gather(*pending)
    is_finished = True
    await recovering
    for number, got in enumerate(responses):
        assert got.status == 200
        body = got.body
        if number % 2:
            *_, body, done = [line for line in body.split(b"\n\n") if line]
            assert done == b"data: [DONE]"
        check(json.loads(body.removeprefix(b"data: ")))


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_http_1_0_client_gets_it_too(make_bench, is_streamed):
    bench = await make_bench(counting(dies_after=7), counting(), config=ON)
    body = json.dumps({**ASK, "stream": is_streamed}).encode()
    whole = await response_to(bench, post(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    text = bodies(whole)[0]
    if is_streamed:
        text = text.split(b"\n\n")[-3].removeprefix(b"data: ")
    check(json.loads(text))
