"""The door over HTTP: which answer is which trouble, and what goes over the wire."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from engines.fake.http import HttpFakeLauncher
from engines.launch import EngineSpec
from engines.protocol import FinishReason, SamplingParams, VersionSpan
from rollout.driver.door import Ask, DoorError, Load, Trouble
from rollout.driver.driver import Driver, RolloutDriver
from rollout.driver.http_door import HttpDoor
from rollout.driver.prompts import Prompt
from rollout.errors import ConfigError, RolloutError

ASK = Ask("0" * 32, [1, 2], SamplingParams(max_new_tokens=3))


@asynccontextmanager
async def serving(handler, path: str = "/generate") -> AsyncIterator[HttpDoor]:
    app = web.Application()
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    door = HttpDoor(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=2.0)
    try:
        yield door
    finally:
        await door.close()
        await runner.cleanup()


@asynccontextmanager
async def fake_engine() -> AsyncIterator[str]:
    running = await HttpFakeLauncher().launch(EngineSpec("e", "fake", "/m", "/dev/null"))
    try:
        yield running.endpoint.url
    finally:
        await running.kill()


async def test_a_fake_engine_answers_with_tokens_log_probs_and_versions() -> None:
    async with fake_engine() as url:
        door = HttpDoor(url, timeout_s=5.0)
        reply = await door.generate(ASK)
        await door.close()
    assert (reply.rid, len(reply.output_ids), reply.output_logprobs) == (ASK.rid, 3, (-1.0,) * 3)
    assert reply.finish_reason == FinishReason("length", None, "")
    assert reply.weight_versions == (VersionSpan("0", 0, 3),)


@pytest.mark.parametrize(
    ("status", "headers", "trouble", "after_s"),
    [
        (400, {}, Trouble.REFUSED, 0.0),
        (404, {}, Trouble.REFUSED, 0.0),
        (413, {}, Trouble.REFUSED, 0.0),
        (429, {"Retry-After": "7"}, Trouble.UNAVAILABLE, 7.0),
        (503, {"Retry-After": "2"}, Trouble.UNAVAILABLE, 2.0),
        (503, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, Trouble.UNAVAILABLE, 0.0),
        (499, {}, Trouble.ABORTED, 0.0),
        (500, {}, Trouble.LOST, 0.0),
        (502, {}, Trouble.LOST, 0.0),
    ],
)
async def test_a_status_says_what_the_trouble_is(status, headers, trouble, after_s) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, headers=headers, text="because")

    async with serving(handler) as door:
        with pytest.raises(DoorError, match=f"HTTP {status}: because") as caught:
            await door.generate(ASK)
    assert (caught.value.trouble, caught.value.retry_after_s) == (trouble, after_s)


@pytest.mark.parametrize(
    "body", ["", "nonsense", "[]", "{}", '{"text": "", "output_ids": [], "meta_info": {}}']
)
async def test_an_answer_that_is_none_is_final(body: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json")

    async with serving(handler) as door:
        with pytest.raises(DoorError, match="unusable answer") as caught:
            await door.generate(ASK)
    assert caught.value.trouble is Trouble.REFUSED


async def test_a_connection_that_breaks_or_is_not_there_is_a_lost_engine() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(handler) as door:
        with pytest.raises(DoorError) as caught:
            await door.generate(ASK)
    assert caught.value.trouble is Trouble.LOST
    nobody = HttpDoor("http://127.0.0.1:1", timeout_s=1.0)
    with pytest.raises(DoorError, match="Connect") as caught:
        await nobody.generate(ASK)
    assert caught.value.trouble is Trouble.LOST
    assert await nobody.load() is None
    await nobody.abort(["x"])
    await nobody.close()


async def test_the_id_goes_first_and_the_session_in_a_header() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((await request.text(), request.headers.get("x-session-id")))
        return web.Response(status=400)

    async with serving(handler) as door:
        for session in ("", "s1"):
            with pytest.raises(DoorError):
                await door.generate(Ask(ASK.rid, [1], SamplingParams(), session))
    assert seen[0][0].startswith(f'{{"rid": "{ASK.rid}"')
    assert [header for _, header in seen] == [None, "s1"]


async def test_an_abort_names_each_request() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((await request.json())["rid"])
        return web.Response(status=502)

    async with serving(handler, "/abort_request") as door:
        await door.abort(["a", "b"])
    assert sorted(seen) == ["a", "b"]


async def test_load_adds_up_what_router_and_engines_say() -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.path == "/engines":
            url = f"http://{request.host}"
            engines = [{"state": "serving", "url": url}] * 2 + [{"state": "dead", "url": url}]
            return web.json_response({"engines": engines, "gate": {"weight_version": 4}})
        rank = {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5}
        return web.json_response({"loads": [rank, rank]})

    async with serving(handler, "/{any:.*}") as door:
        assert await door.load() == Load(2, 12, 4, 0.5, 4)


async def test_an_engine_that_is_no_router_tells_no_load() -> None:
    async with fake_engine() as url:
        door = HttpDoor(url, timeout_s=5.0)
        assert await door.load() is None
        await door.close()


async def test_a_rollout_over_http_comes_back_whole() -> None:
    async with fake_engine() as url, RolloutDriver(url, lambda sample: 1.0) as driver:
        groups = await driver.rollout(
            0, [Prompt((1,)), Prompt((2,))], group_size=2, sampling=SamplingParams(4)
        )
    assert [group.rewards for group in groups] == [[1.0, 1.0]] * 2


async def test_the_driver_of_threads_gives_what_is_pending_and_its_errors() -> None:
    async with fake_engine() as url:

        def work() -> None:
            driver = Driver(url, lambda sample: float("nan"))
            asked = driver.rollout(0, [Prompt((1,))], group_size=1, sampling=SamplingParams(2))
            with pytest.raises(RolloutError, match="the reward is nan; it must be a finite"):
                asked.result()
            driver.close()
            driver.close()

        await asyncio.to_thread(work)


def test_a_driver_that_cannot_be_made_leaves_no_thread() -> None:
    with pytest.raises(ConfigError, match="max_in_flight = 0"):
        Driver("http://127.0.0.1:1", max_in_flight=0)
