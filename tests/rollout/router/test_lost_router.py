"""A router that is killed with SIGKILL, and the one in its place: replies go on where they were."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest

from rollout.router.state.state_file import StateFile
from tests.rollout.router.counting_engine import ASK, counting
from tests.rollout.router.router_process import RouterProcess
from tests.rollout.router.stub_engine import Hold, StubEngine

pytestmark = pytest.mark.clock

MINE = {**ASK, "rid": "mine"}


@pytest.fixture
def state() -> Iterator[StateFile]:
    made = StateFile.make(1 << 24)
    yield made
    made.close()


@asynccontextmanager
async def engines(*scripts: Any) -> AsyncIterator[list[StubEngine]]:
    made = [StubEngine(f"e-{number}", script) for number, script in enumerate(scripts)]
    for engine in made:
        await engine.start()
    try:
        yield made
    finally:
        for engine in made:
            await engine.stop()


@asynccontextmanager
async def serving(
    state: StateFile, *members: StubEngine, **weights: Any
) -> AsyncIterator[RouterProcess]:
    async with RouterProcess(state, token_failover="on") as router:
        ports = [(number, one.endpoint.port) for number, one in enumerate(members)]
        await router.call("members", 1, ports)
        await router.call("gate", "open", weights)
        yield router


async def ask(router: RouterProcess, body: dict[str, Any], path: str = "/generate") -> Any:
    async with (
        aiohttp.ClientSession(router.endpoint.url) as client,
        client.post(path, json=body) as response,
    ):
        if body.get("stream"):
            return (await response.read()).decode()
        return await response.json()


async def lose_router(
    state: StateFile, hold: Hold, engine: StubEngine, body: Any, **weights: Any
) -> None:
    """Kill a router that has tokens of a request; its engine holds the rest."""
    with suppress(ProcessLookupError):
        async with serving(state, engine, **weights) as router:
            pending = asyncio.create_task(ask(router, body))
            await hold.entered.wait()
            await asyncio.sleep(0.1)  # the router has read them
            await router.kill()
            with pytest.raises(aiohttp.ClientError):
                await pending


async def test_a_reply_goes_on_from_the_tokens_that_the_lost_router_had(state: StateFile) -> None:
    hold = Hold()
    async with engines(counting(dies_after=9, hold=hold), counting(version="2")) as (first, second):
        await lose_router(state, hold, first, MINE)
        async with serving(state, second) as router:
            reply = await ask(router, MINE)
            stats = await router.call("stats")
        hold.opened.set()
    assert reply["output_ids"] == list(range(3, 23))
    assert reply["text"] == "x" * 20
    assert len(reply["meta_info"]["output_token_logprobs"]) == 20
    versions = [one["version"] for one in reply["meta_info"]["weight_versions"]]
    assert versions[-1] == "2"
    assert len(versions) == 2
    (got,) = [one.json for one in second.seen if one.target == "/generate"]
    num_kept = len(got["input_ids"]) - 3
    assert num_kept >= 5
    assert got["input_ids"][3:] == reply["output_ids"][:num_kept]
    assert reply["meta_info"]["id"] == "mine"
    assert got["rid"] not in ("mine", first.seen[0].json["rid"])
    assert (stats["num_resumed"], stats["num_tokens_kept"]) == (1, num_kept)
    assert records(state) == []


def adapters(version: int) -> dict[str, Any]:
    """The weights of a server whose adapter has this version."""
    names = {"": f"policy@{version}", "policy": f"policy@{version}"}
    return {"weight_version": version, "base_version": 1, "adapters": names}


@pytest.mark.slow
@pytest.mark.parametrize("name", [{}, {"lora_path": "policy"}])
async def test_a_reply_of_an_adapter_goes_on_with_the_same_version(
    state: StateFile, name: dict[str, str]
) -> None:
    hold, body = Hold(), MINE | name
    async with engines(counting(dies_after=9, hold=hold), counting()) as (first, second):
        await lose_router(state, hold, first, body, **adapters(8))
        async with serving(state, second, **adapters(8)) as router:
            reply = await ask(router, body)
        hold.opened.set()
    assert reply["output_ids"] == list(range(3, 23))
    versions = reply["meta_info"]["weight_versions"]
    assert {one["version"] for one in versions} == {"8"}
    (got,) = [one.json for one in second.seen if one.target == "/generate"]
    assert (len(got["input_ids"]) >= 3 + 5, got["lora_path"]) == (True, "policy@8")
    assert records(state) == []


async def test_a_reply_of_an_adapter_starts_over_with_a_newer_version(state: StateFile) -> None:
    hold = Hold()
    async with engines(counting(dies_after=9, hold=hold), counting()) as (first, second):
        await lose_router(state, hold, first, MINE, **adapters(8))
        async with serving(state, second, **adapters(9)) as router:
            reply = await ask(router, MINE)
            assert (await router.call("stats"))["num_resumed"] == 0
        hold.opened.set()
    assert {one["version"] for one in reply["meta_info"]["weight_versions"]} <= {"9"}
    (got,) = [one.json for one in second.seen if one.target == "/generate"]
    assert (got["input_ids"], got["lora_path"]) == ([1, 2, 3], "policy@9")


@pytest.mark.slow
async def test_a_refusal_before_the_router_knows_its_weights_keeps_the_tokens(
    state: StateFile,
) -> None:
    hold = Hold()
    async with engines(counting(dies_after=9, hold=hold), counting()) as (first, second):
        await lose_router(state, hold, first, MINE, **adapters(8))
        async with RouterProcess(state, token_failover="on") as router:
            assert "closed" in (await ask(router, MINE))["error"]["message"]
            await router.call("members", 1, [(0, second.endpoint.port)])
            await router.call("gate", "open", adapters(8))
            await ask(router, MINE)
            assert (await router.call("stats"))["num_resumed"] == 1
        hold.opened.set()


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"rid": "other"}, {"input_ids": [1, 2, 4]}])
async def test_another_request_gets_nothing_of_it(state: StateFile, other: dict[str, Any]) -> None:
    hold = Hold()
    async with engines(counting(dies_after=9, hold=hold), counting()) as (first, second):
        await lose_router(state, hold, first, MINE)
        async with serving(state, second) as router:
            await ask(router, {**MINE, **other})
            assert (await router.call("stats"))["num_resumed"] == 0
        hold.opened.set()
    (got,) = [one.json for one in second.seen if one.target == "/generate"]
    assert len(got["input_ids"]) == 3


@pytest.mark.slow
async def test_a_reply_goes_on_over_several_lost_routers(state: StateFile) -> None:
    holds = [Hold(), Hold()]
    scripts = [counting(dies_after=6, hold=hold) for hold in holds]
    async with engines(*scripts, counting()) as (*lost, last):
        for hold, engine in zip(holds, lost, strict=True):
            await lose_router(state, hold, engine, MINE)
        async with serving(state, last) as router:
            reply = await ask(router, MINE)
        for hold in holds:
            hold.opened.set()
    assert reply["output_ids"] == list(range(3, 23))
    (got,) = [one.json for one in last.seen if one.target == "/generate"]
    assert len(got["input_ids"]) >= 3 + 8


async def test_a_stream_begins_with_the_tokens_that_the_lost_router_had(state: StateFile) -> None:
    hold, body = Hold(), {**MINE, "stream": True}
    async with engines(counting(dies_after=9, hold=hold), counting()) as (first, second):
        await lose_router(state, hold, first, body)
        async with serving(state, second) as router:
            events = (await ask(router, body)).split("\n\n")
        hold.opened.set()
    assert '"output_ids":[3,4,5,' in events[0].replace(" ", "")
    assert ",22]" in events[-3].replace(" ", "")


@pytest.mark.slow
async def test_without_room_for_its_tokens_a_request_starts_over() -> None:
    state = StateFile.make(1 << 13)
    hold = Hold()
    body = {**MINE, "input_ids": [1] * 3000}
    async with engines(counting(dies_after=9, hold=hold), counting()) as (first, second):
        await lose_router(state, hold, first, body)
        async with serving(state, second) as router:
            reply = await ask(router, body)
            stats = await router.call("stats")
        hold.opened.set()
    state.close()
    assert len(reply["output_ids"]) == 20
    assert (stats["num_resumed"], stats["num_not_kept"] > 0) == (0, True)


def records(state: StateFile) -> list[Any]:
    return StateFile(state.path, 1 << 24).records()
