"""The client over HTTP: which reply is which kind of failure, and what goes over the wire."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from engines.fake.http_fake import HttpFakeLauncher
from engines.launch import EngineSpec
from engines.protocol import NO_ACCESS, FinishReason, SamplingParams, VersionSpan
from engines.protocol.logprob_kind import LogprobKind
from rollout.core.errors import RolloutError
from rollout.driver.client import http_client
from rollout.driver.client.generation_client import (
    EngineLoad,
    FailureKind,
    GenerationError,
    GenerationRequest,
)
from rollout.driver.client.http_client import HttpGenerationClient
from rollout.driver.client.sample_requests import make_requests, rid_prefix
from rollout.driver.data.prompt import Prompt
from rollout.driver.driver import Driver, RolloutDriver
from rollout.rules.contract import HEADERS, NO_CONTRACT, Contract
from rollout.rules.routing import JUST_STARTED

REQUEST = GenerationRequest("0" * 32, [1, 2], SamplingParams(max_new_tokens=3))


@asynccontextmanager
async def serving(
    handler, path: str = "/generate", **options: Any
) -> AsyncIterator[HttpGenerationClient]:
    app = web.Application()
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = HttpGenerationClient(url, timeout_s=2.0, **options)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


@asynccontextmanager
async def fake_engine() -> AsyncIterator[str]:
    running = await HttpFakeLauncher().launch(
        EngineSpec("e", "fake", "/m", "/dev/null", access=NO_ACCESS)
    )
    try:
        yield running.endpoint.url
    finally:
        await running.kill()


async def test_a_fake_engine_replies_with_tokens_log_probs_and_versions() -> None:
    async with fake_engine() as url:
        client = HttpGenerationClient(url, timeout_s=5.0)
        reply = await client.generate(REQUEST)
        await client.close()
    assert (reply.rid, len(reply.output_ids), reply.output_logprobs) == (
        REQUEST.rid,
        3,
        (-1.0,) * 3,
    )
    assert reply.finish_reason == FinishReason("length", None, "")
    assert reply.weight_versions == (VersionSpan("0", 0, 3),)


@pytest.mark.parametrize(
    ("status", "headers", "kind", "after_s"),
    [
        (400, {}, FailureKind.REFUSED, 0.0),
        (404, {}, FailureKind.REFUSED, 0.0),
        (413, {}, FailureKind.REFUSED, 0.0),
        (429, {"Retry-After": "7"}, FailureKind.UNAVAILABLE, 7.0),
        (503, {"Retry-After": "2"}, FailureKind.UNAVAILABLE, 2.0),
        (503, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, FailureKind.UNAVAILABLE, 0.0),
        (499, {}, FailureKind.ABORTED, 0.0),
        (500, {}, FailureKind.LOST, 0.0),
        (502, {}, FailureKind.LOST, 0.0),
    ],
)
async def test_a_status_maps_to_a_kind_of_failure(status, headers, kind, after_s) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, headers=headers, text="because")

    async with serving(handler) as client:
        with pytest.raises(GenerationError, match=f"HTTP {status}: because") as caught:
            await client.generate(REQUEST)
    assert (caught.value.kind, caught.value.retry_after_s) == (kind, after_s)


CONTRACT = Contract(weight_version=3, logprob_kind=LogprobKind.FULL)
NO_SUCH_VERSION = {"type": "weight_version", "message": "version 3 is past", "weight_version": 5}


async def test_what_a_request_wants_of_its_tokens_goes_over_the_wire() -> None:
    seen: list[dict[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append({name.lower(): value for name, value in request.headers.items()})
        return web.Response(status=400)

    async with serving(handler) as client:
        lagging = Contract(min_weight_version=0, max_version_lag=2)
        for contract, fails_over in (
            (CONTRACT, False),
            (lagging, True),
            (lagging, False),  # its client checks the lag
            (NO_CONTRACT, False),
        ):
            request = replace(REQUEST, contract=contract, fails_over=fails_over)
            with pytest.raises(GenerationError):
                await client.generate(request)
    wanted = [{name: one[name] for name in HEADERS.values() if name in one} for one in seen]
    assert wanted == [
        {"x-weight-version": "3", "x-logprob-kind": "full"},
        {"x-min-weight-version": "0", "x-max-version-lag": "2"},
        {"x-min-weight-version": "0"},
        {},
    ]


@pytest.mark.parametrize(
    ("status", "error", "kind", "version"),
    [
        (409, NO_SUCH_VERSION, FailureKind.VERSION, 5),
        (409, NO_SUCH_VERSION | {"weight_version": None}, FailureKind.VERSION, None),
        (409, NO_SUCH_VERSION | {"type": "other"}, FailureKind.REFUSED, None),
        (409, "version 3 is past", FailureKind.REFUSED, None),
        (409, NO_SUCH_VERSION | {"type": []}, FailureKind.REFUSED, None),
        (400, {"type": "logprob_kind", "message": "is past"}, FailureKind.LOGPROB_KIND, None),
        (400, {"type": "weight_version"}, FailureKind.REFUSED, None),
        (503, NO_SUCH_VERSION, FailureKind.UNAVAILABLE, None),
    ],
)
async def test_a_contract_that_cannot_be_fulfilled_is_final_with_the_version_that_could_be_had(
    status: int, error: Any, kind: FailureKind, version: int | None
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"error": error}, status=status)

    async with serving(handler) as client:
        with pytest.raises(GenerationError) as caught:
            await client.generate(replace(REQUEST, contract=CONTRACT))
    assert (caught.value.kind, caught.value.weight_version) == (kind, version)
    assert caught.value.is_final is (kind is not FailureKind.UNAVAILABLE)
    if kind in (FailureKind.VERSION, FailureKind.LOGPROB_KIND):
        assert str(caught.value).endswith("is past")


@pytest.mark.parametrize(
    ("contract", "words"),
    [
        (NO_CONTRACT, "no reply within 0.05 s"),
        (Contract(min_weight_version=7), "no reply within 0.05 s, .* weight version 7 is awaited"),
    ],
)
async def test_a_request_without_a_reply_in_time_names_the_version_that_it_may_wait_for(
    contract: Contract, words: str
) -> None:
    is_over = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        await is_over.wait()
        return web.Response(status=503)

    async with serving(handler) as client:
        with pytest.raises(GenerationError, match=f"{words}$") as caught:
            await client.generate(replace(REQUEST, contract=contract, timeout_s=0.05))
        is_over.set()
    assert caught.value.kind is FailureKind.LOST


async def test_a_stream_may_end_with_a_broken_contract() -> None:
    async def handler(request: web.Request) -> web.Response:
        event = json.dumps({"error": NO_SUCH_VERSION})
        return web.Response(text=f"data: {event}\n\n", content_type="text/event-stream")

    async with serving(handler) as client:
        with pytest.raises(GenerationError, match="version 3 is past") as caught:
            await anext(client.stream(REQUEST))
    assert (caught.value.kind, caught.value.weight_version) == (FailureKind.VERSION, 5)


LONG = {"id": "r-1", "finish_reason": "x" * 9000, "weight_version": "3"}
LONG |= {"output_token_logprobs": [[-1.0, 1, None]]}


@pytest.mark.parametrize(
    "body",
    [
        "",
        "nonsense",
        "[]",
        "{}",
        '{"text": "", "output_ids": [], "meta_info": {}}',
        json.dumps({"output_ids": [1], "meta_info": LONG}),
    ],
    ids=range(6),
)
async def test_an_unusable_reply_is_final(body: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json")

    async with serving(handler) as client:
        with pytest.raises(GenerationError, match="unusable reply") as caught:
            await client.generate(REQUEST)
    assert caught.value.kind is FailureKind.REFUSED
    assert len(str(caught.value)) < 500, "it quotes a part of the reply"


async def test_a_broken_or_refused_connection_is_a_lost_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "_RECONNECT_S", 0.0)

    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(handler) as client:
        with pytest.raises(GenerationError) as caught:
            await client.generate(REQUEST)
    assert caught.value.kind is FailureKind.LOST
    unreachable = HttpGenerationClient("http://127.0.0.1:1", timeout_s=1.0)
    with pytest.raises(GenerationError, match="Connect") as caught:
        await unreachable.generate(REQUEST)
    assert caught.value.kind is FailureKind.LOST
    assert await unreachable.load() is None
    await unreachable.abort(["x"])
    await unreachable.close()


async def test_the_id_goes_first_and_the_affinity_in_a_header() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((await request.text(), request.headers.get("x-affinity")))
        return web.Response(status=400)

    async with serving(handler) as client:
        for affinity in ("", "s1"):
            with pytest.raises(GenerationError):
                await client.generate(
                    GenerationRequest(REQUEST.rid, [1], SamplingParams(), affinity)
                )
    assert seen[0][0].startswith(f'{{"rid": "{REQUEST.rid}"')
    assert [header for _, header in seen] == [None, "s1"]


async def test_an_abort_names_each_request() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((await request.json())["rid"])
        return web.Response(status=502)

    async with serving(handler, "/abort_request") as client:
        await client.abort(["a", "b"])
    assert sorted(seen) == ["a", "b"]


async def test_load_adds_up_the_reports_of_router_and_engines() -> None:
    asked = []

    async def handler(request: web.Request) -> web.Response:
        if request.path == "/engines":
            engines = [
                {"state": state, "engine_id": engine_id, "kind": engine_id[:-2]}
                for engine_id, state in (
                    *(("sglang-0", "serving"), ("sglang-1", "serving")),
                    *(("vllm-0", "serving"), ("sglang-2", "dead")),
                )
            ]
            return web.json_response({"engines": engines, "gate": {"weight_version": 4}})
        asked.append(request.path)
        if request.path == "/engines/vllm-0/loads":
            labels = '{model_name="m",engine="0"}'
            figures = ("num_requests_running", 7), ("num_requests_waiting", 2)
            lines = [f"vllm:{name}{labels} {value}.0" for name, value in figures]
            return web.Response(text="\n".join([*lines, f"vllm:kv_cache_usage_perc{labels} 0.75"]))
        rank = {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5}
        return web.json_response({"loads": [rank, rank]})

    async with serving(handler, "/{any:.*}") as client:
        assert await client.load() == EngineLoad(3, 19, 6, 0.75, 4)
    assert sorted(asked) == [
        f"/engines/{name}/loads" for name in ("sglang-0", "sglang-1", "vllm-0")
    ]


@pytest.mark.parametrize(
    ("lora_path", "version"),
    [("", 9), (None, 7), ("policy", 9), ("judge", 8), ("judge@7", 7), ("not-pushed", 7)],
)
async def test_the_version_of_a_client_is_that_of_the_weights_that_answer_it(
    lora_path: str | None, version: int
) -> None:
    gate = {
        "weight_version": 9,
        "base_version": 7,
        "adapters": {"": "policy@9", "policy": "policy@9", "judge": "judge@8"},
    }

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"engines": [], "gate": gate})

    async with serving(handler, "/engines", lora_path=lora_path) as client:
        load = await client.load()
    assert load is not None
    assert load.weight_version == version


async def test_an_engine_that_is_not_a_router_reports_no_load() -> None:
    async with fake_engine() as url:
        client = HttpGenerationClient(url, timeout_s=5.0)
        assert await client.load() is None
        await client.close()


async def test_a_rollout_over_http_returns_all_groups() -> None:
    async with fake_engine() as url, RolloutDriver(url, lambda sample: 1.0) as driver:
        groups = await driver.rollout(
            0, [Prompt((1,)), Prompt((2,))], group_size=2, sampling=SamplingParams(4)
        )
    assert [group.rewards for group in groups] == [[1.0, 1.0]] * 2


async def test_the_threaded_driver_returns_pendings_with_results_and_errors() -> None:
    async with fake_engine() as url:

        def work() -> None:
            driver = Driver(url, lambda sample: float("nan"))
            pending = driver.rollout(0, [Prompt((1,))], group_size=1, sampling=SamplingParams(2))
            with pytest.raises(RolloutError, match="reward returned nan, and must return a finite"):
                pending.result()
            driver.close()
            driver.close()

        await asyncio.to_thread(work)


def test_a_driver_that_fails_to_start_leaves_no_thread() -> None:
    with pytest.raises(ValueError, match="max_in_flight = 0"):
        Driver("http://127.0.0.1:1", max_in_flight=0)


async def test_what_a_reply_has_besides_its_tokens_is_asked_for_and_read() -> None:
    asked: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(await request.json() | {"failover": request.headers["x-token-failover"]})
        meta = {
            "id": "r",
            "weight_version": "3",
            "prompt_tokens": 2,
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, 7, None]],
            "input_token_logprobs": [[None, 1, None], [-2.0, 2, None]],
            "output_top_logprobs": [[[-0.5, 7, None], [-1.5, 8, None]]],
            "input_top_logprobs": [None, [[-2.0, 2, None], [-2.5, 3, None]]],
            "routed_experts": base64.b64encode(b"\1\0\0\0\2\0\0\0").decode(),
            "output_token_sampling_mask": [[7, 9]],
            "num_failovers": 2,
        }
        return web.json_response({"text": "t", "output_ids": [7], "meta_info": meta})

    requests = make_requests(
        [[1, 2], [3]],
        SamplingParams(max_new_tokens=1, n=2, sampling_seed=5),
        "mine",
        image_data=[["a.png", "b.png"], None],
        prompt_logprobs=True,
        top_logprobs=2,
        routed_experts=True,
        sampling_mask=True,
        lora_path="adapter",
    )
    async with serving(handler) as client:
        replies = [await client.generate(request) for request in requests]
    assert replies[0].output_top_logprobs == ({7: -0.5, 8: -1.5},)
    assert replies[0].input_top_logprobs == ({2: -2.0, 3: -2.5},)
    assert replies[0].input_logprobs == (-2.0,)
    assert replies[0].routed_experts == b"\1\0\0\0\2\0\0\0"
    assert replies[0].sampling_mask == ((7, 9),)
    assert replies[0].num_failovers == 2
    wanted = {
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "return_routed_experts": True,
        "return_sampling_mask": True,
        "return_logprob": True,
        "lora_path": "adapter",
        "failover": "on",
    }
    assert all(wanted.items() <= body.items() for body in asked)
    assert [body["input_ids"] for body in asked] == [[1, 2], [1, 2], [3], [3]]
    assert [body.get("image_data") for body in asked] == [["a.png", "b.png"]] * 2 + [None] * 2
    assert [body["sampling_params"]["sampling_seed"] for body in asked] == [5, 6, 5, 6]
    assert all("n" not in body["sampling_params"] for body in asked)
    rids = [body["rid"] for body in asked]
    assert len({rid[:24] for rid in rids}) == 1
    assert {len(rid) for rid in rids} == {32}
    assert rids[0].startswith(rid_prefix("mine"))
    assert not rids[0].startswith(rid_prefix("mine-1"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'data: {"error": {"message": "too long"}}\n\n', "too long"),
        (b"data: [DONE]\n\n", "ended before its reply"),
        (b"data: {nonsense}\n\n", "unusable reply"),
    ],
)
async def test_a_stream_that_breaks_off_is_an_error(body: bytes, said: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="text/event-stream")

    async with serving(handler) as client:
        with pytest.raises(GenerationError, match=said):
            async for _ in client.stream(REQUEST):
                pass


@pytest.mark.parametrize(
    ("given", "sent"),
    [({}, {}), ({"lora_path": ""}, {}), ({"lora_path": None}, {"lora_path": None})],
)
async def test_a_request_names_its_weights_only_if_its_caller_does(given, sent) -> None:
    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append({name: body[name] for name in body if name == "lora_path"})
        meta = {"id": "r", "finish_reason": {"type": "stop"}}
        return web.json_response({"text": "", "output_ids": [], "meta_info": meta})

    asked: list[dict[str, Any]] = []
    requests = make_requests([1], None, "", **given)
    async with serving(handler) as client:
        await client.generate(*requests)
    async with serving(handler, **given) as client:
        await client.generate(*make_requests([1], None, ""))
    assert asked == [sent, sent]


def whole_reply(rid: str) -> web.Response:
    meta = {
        "id": rid,
        "weight_version": "3",
        "finish_reason": {"type": "length"},
        "completion_tokens": 1,
        "output_token_logprobs": [[-1.0, 7, None]],
    }
    return web.json_response({"text": "x", "output_ids": [7], "meta_info": meta})


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_request_whose_router_was_lost_is_sent_again_with_the_same_id(
    is_refused: bool,
) -> None:
    got: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        got.append(await request.json())
        if len(got) == 3:
            return whole_reply(got[-1]["rid"])
        if is_refused:
            gate = {"type": "unavailable", "gate": "closed", "reason": JUST_STARTED}
            return web.json_response({"error": gate}, status=503)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(handler) as client:
        reply = await client.generate(REQUEST)
    assert reply.output_ids == (7,)
    assert [one["rid"] for one in got] == [REQUEST.rid] * 3
    assert got[0] == got[1] == got[2]


async def test_all_requests_wait_once_for_a_router_that_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "_RECONNECT_S", 0.5)
    now_s = asyncio.get_running_loop().time

    async def handler(request: web.Request) -> web.Response:
        return whole_reply("0")

    async with serving(handler) as client:
        await client.generate(REQUEST)
        client._generate_url = "http://127.0.0.1:1/generate"  # nothing listens there
        began_s = now_s()
        failed = await asyncio.gather(
            *(client.generate(REQUEST) for _ in range(200)), return_exceptions=True
        )
        assert all(isinstance(one, GenerationError) for one in failed)
        assert now_s() - began_s > 0.5
        began_s = now_s()
        with pytest.raises(GenerationError):
            await client.generate(REQUEST)
        assert now_s() - began_s < 0.4


async def test_an_abort_waits_for_a_router_that_was_lost() -> None:
    num = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal num
        num += 1
        if num < 3:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({})

    async with serving(handler, "/abort_request") as client:
        await client.order_abort("0")
    assert num == 3


async def test_an_abort_by_prefix_says_that_it_is_one() -> None:
    orders: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        orders.append(await request.json())
        return web.json_response({})

    async with serving(handler, "/abort_request") as client:
        await client.order_abort("0")
        await client.abort(["a"], prefix="b")
    assert orders[0] == {"rid_prefix": "0"}
    assert sorted(map(str, orders[1:])) == ["{'rid': 'a'}", "{'rid_prefix': 'b'}"]


async def test_figures_that_the_page_refuses_are_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response(
            {"error": {"message": "a metric's name has 300\ncharacters"}}, status=400
        )

    async with serving(refuse, "/figures") as client:
        for step in range(3):
            await client.report({"step": step, "metrics": {}})
    (record,) = [one for one in caplog.records if one.name.startswith("rollout.driver")]
    assert "step 0: the server's page does not show its figures" in record.getMessage()
    assert "a metric's name has 300" in record.getMessage()


async def test_an_engine_that_has_no_page_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def missing(request: web.Request) -> web.Response:
        return web.json_response({}, status=404)

    async with serving(missing, "/figures") as client:
        await client.report({"step": 1, "metrics": {}})
    assert [one for one in caplog.records if one.name.startswith("rollout.driver")] == []
