"""An engine whose API server answers though the engine is dead, or that only fails, draws nothing.

vLLM's API server outlives its engine core for seconds.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rollout.router.gate import avoidance
from rollout.router.gate.avoidance import MOST_IN_A_ROW
from rollout.router.proxy.engine_errors import is_own_error
from tests.rollout.router.conftest import MakeBench, router_config
from tests.rollout.router.served_vllm import PROMPT, Served, events_of, served
from tests.rollout.router.stub_engine import Hold, die_unanswered, hold_then_reply, reply, stream
from tests.support.waits import until

pytestmark = pytest.mark.timeout(60)

GENERATE, OWN, COMPLETIONS, CHAT = (
    "/generate",
    "/inference/v1/generate",
    "/v1/completions",
    "/v1/chat/completions",
)
NUM = 20
BODIES: dict[str, dict[str, Any]] = {
    GENERATE: {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": NUM}},
    OWN: {"token_ids": PROMPT, "sampling_params": {"max_tokens": NUM}},
    COMPLETIONS: {"model": "m", "prompt": PROMPT, "max_tokens": NUM, "return_token_ids": True},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": NUM},
}
DEAD = b'{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the '
DEAD += b'root cause.","type":"InternalServerError","param":null,"code":500}}'
DEAD_EVENT = b"data: " + DEAD.replace(b'{"error":{', b'{"error": {') + b"\n\n"
ERROR_500 = "500 Internal Server Error"


@pytest.fixture(autouse=True)
def for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is avoided stays so, however slow this machine is."""
    monkeypatch.setattr(avoidance, "AVOIDED_S", 1e6)


def answer_of(path: str, content: bytes, *, is_streamed: bool) -> Any:
    """The tokens or the words of a whole reply or of a stream, and why it ended."""
    if path == GENERATE:
        last = events_of(content)[-1] if is_streamed else json.loads(content)
        return last["output_ids"], last["meta_info"]["finish_reason"]["type"]
    events = events_of(content) if is_streamed else [json.loads(content)]
    choices = [one["choices"][0] for one in events if one["choices"]]
    (reason,) = [one["finish_reason"] for one in choices if one.get("finish_reason")]
    if path == CHAT:
        parts = [one.get("delta") or one.get("message") or {} for one in choices]
        return "".join(part.get("content") or "" for part in parts).split(), reason
    return [token for one in choices for token in one.get("token_ids") or ()], reason


async def asked(whole: Served, path: str, *, is_streamed: bool) -> Any:
    status, _, content = await whole.post({**BODIES[path], "stream": is_streamed}, path)
    assert status == 200, content
    assert b"error" not in content, content
    return answer_of(path, content, is_streamed=is_streamed)


async def states(whole: Any) -> list[str]:
    return [engine["state"] for engine in (await whole.host.stats())["engines"]]


@pytest.mark.parametrize(
    ("status", "is_own"),
    [(200, False), (400, False), (422, False), (500, True), (501, False), (502, True), (503, True)],
)
def test_whose_fault_an_error_is_by_its_status(status, is_own):
    assert is_own_error(status) is is_own


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_request_continues_elsewhere_when_the_core_of_its_engine_dies(
    path: str, is_streamed: bool
) -> None:
    async with served("vllm", "vllm", token_failover="on", token_s=0.01) as whole:
        uncut = await asked(whole, path, is_streamed=is_streamed)
        tasks = [asyncio.create_task(asked(whole, path, is_streamed=is_streamed)) for _ in range(4)]
        first = whole.engines[0]
        await until(
            lambda: [one for one in first.in_flight.values() if len(one.output_ids) >= NUM // 2]
        )
        first.lose_core()  # type: ignore[attr-defined]
        for answer in await asyncio.gather(*tasks):
            assert len(answer[0]) == len(uncut[0])
            assert answer[0][:4] == uncut[0][:4]
            assert answer[1] == uncut[1] == "length"
        assert await states(whole) == ["dead", "serving"]
        stats = await whole.host.stats()
        assert stats["num_failovers"] == stats["num_engine_failures"] == 2
        assert stats["num_broken_replies"] == 0


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_new_request_is_answered_though_the_core_of_an_engine_is_dead(
    path: str, is_streamed: bool
) -> None:
    async with served("vllm", "vllm", token_failover="on") as whole:
        uncut = await asked(whole, path, is_streamed=is_streamed)
        whole.engines[0].lose_core()  # type: ignore[attr-defined]
        for _ in range(3):
            assert await asked(whole, path, is_streamed=is_streamed) == uncut
        assert await states(whole) == ["dead", "serving"]


@pytest.mark.parametrize("path", [OWN, COMPLETIONS, CHAT])
async def test_without_token_failover_a_whole_reply_starts_over_once(path: str) -> None:
    async with served("vllm", "vllm") as whole:
        uncut = await asked(whole, path, is_streamed=False)
        whole.engines[0].lose_core()  # type: ignore[attr-defined]
        for _ in range(3):
            assert await asked(whole, path, is_streamed=False) == uncut
        assert await states(whole) == ["dead", "serving"]


async def vllm_bench(make_bench, *scripts, config=None):
    bench = await make_bench(*scripts, config=config)
    members = [bench.member(index, kind="vllm") for index in range(len(scripts))]
    await bench.host.set_members(2, members)
    return bench


async def test_a_stream_that_is_passed_on_ends_with_an_error_and_its_engine_leaves(make_bench):
    hold = Hold()
    bench = await vllm_bench(make_bench, stream(hold, DEAD_EVENT), reply(b"{}"))
    body = {**BODIES[COMPLETIONS], "stream": True}
    async with bench.client.request("POST", COMPLETIONS, json=body) as response:
        hold.opened.set()  # the client has the head, so the request is not sent again
        content = await response.read()
    assert json.loads(content.removeprefix(b"data: "))["error"]["engine"] == "e-0"
    assert await states(bench) == ["dead", "serving"]
    assert [await bench.ask(COMPLETIONS, json=body) for _ in range(3)]
    assert len(bench.engines[1].seen) == 3


@pytest.mark.parametrize(("token_failover", "most"), [("on", 3), ("off", 2)])
async def test_a_request_that_kills_each_engine_is_not_sent_to_all(
    make_bench, token_failover, most
):
    dead = reply(DEAD, ERROR_500, ("Content-Type: application/json",))
    config = router_config(token_failover=token_failover)
    bench = await vllm_bench(make_bench, *[dead] * 4, config=config)
    got = await bench.ask(COMPLETIONS, json=BODIES[COMPLETIONS])
    assert (got.status, got.json["error"]["engine"]) == (502, f"e-{most - 1}")
    assert "EngineCore encountered an issue" in got.json["error"]["message"]
    assert await states(bench) == ["dead", "serving", "serving", "serving"]
    assert [len(engine.seen) for engine in bench.engines] == [1] * most + [0] * (4 - most)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (ERROR_500, b'{"error":{"message":"","type":"InternalServerError","code":500}}'),
        (ERROR_500, b"Internal Server Error"),
        ("400 Bad Request", DEAD.replace(b"500", b"400")),
        ("400 Bad Request", b'{"error":{"message":"no EngineCore encountered an issue"}}'),
    ],
)
async def test_another_error_of_vllm_is_final(make_bench, status, body):
    error = reply(body, status, ("Content-Type: application/json",))
    bench = await vllm_bench(make_bench, error, error, config=router_config(token_failover="on"))
    got = await bench.ask(COMPLETIONS, json=BODIES[COMPLETIONS])
    assert (got.status, got.body) == (int(status[:3]), body)
    assert await states(bench) == ["serving"] * 2
    assert bench.failures == []


async def test_sglang_says_nothing_by_such_a_text(make_bench):
    bench = await make_bench(reply(DEAD, ERROR_500), config=router_config(token_failover="on"))
    assert (await bench.ask(COMPLETIONS, json=BODIES[COMPLETIONS])).status == 500
    assert await states(bench) == ["serving"]


def whole_and_streamed(token_failover):
    config = router_config(token_failover=token_failover)
    error = {"error": {"message": "", "type": "InternalServerError", "code": 500}}
    event = b"data: " + json.dumps(error).encode() + b"\n\n"
    return [
        (config, reply(b"Internal Server Error", ERROR_500), False),
        (config, stream(event), True),
    ]


@pytest.mark.parametrize(
    ("config", "fails", "is_streamed"), whole_and_streamed("on") + whole_and_streamed("off")
)
async def test_an_engine_that_fails_fast_does_not_draw_the_load(
    make_bench, config, fails, is_streamed
):
    """64 clients ask again and again, as fast as they get answers."""
    choice = {"index": 0, "text": "x", "token_ids": [7], "finish_reason": "length"}
    last = {"choices": [choice], "usage": {"completion_tokens": 1}}
    answers = stream(b"data: " + json.dumps(last).encode() + b"\n\n", b"data: [DONE]\n\n")
    hold = Hold()

    async def takes_a_while(connection, seen):
        await hold()
        await (answers if seen.json.get("stream") else reply(b"{}"))(connection, seen)

    bench = await make_bench(fails, takes_a_while, config=config)
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 1, "stream": is_streamed}

    async def client():
        for _ in range(4):
            await bench.ask(COMPLETIONS, json=body)

    clients = asyncio.gather(*(client() for _ in range(64)))
    while not (await bench.host.stats())["engines"][0]["is_avoided"]:
        pass
    hold.opened.set()
    await clients
    failing, other = (len(engine.seen) for engine in bench.engines)
    # Up to half of the clients' requests were on their way when the last of the errors came.
    assert failing <= 32 + MOST_IN_A_ROW
    assert failing + other == 256
    assert await states(bench) == ["serving"] * 2


async def test_a_client_whose_requests_fail_everywhere_takes_no_engine_out(make_bench):
    async def fails_bad_ones(connection, seen):
        is_bad = b'"bad"' in seen.body  # the id that the router adds may have these letters
        await (reply(b"no", ERROR_500) if is_bad else reply(b"{}"))(connection, seen)

    bench = await make_bench(fails_bad_ones, fails_bad_ones)
    for _ in range(6 * MOST_IN_A_ROW):
        got = await bench.ask(COMPLETIONS, json={"prompt": "bad"})
        assert (got.status, got.body) == (500, b"no")
    for _ in range(4):
        assert (await bench.ask(COMPLETIONS, json={"prompt": "good"})).status == 200
    stats = await bench.host.stats()
    assert [one["is_avoided"] for one in stats["engines"]] == [False] * 2
    num_seen = [len(engine.seen) for engine in bench.engines]
    assert sum(num_seen) == 6 * MOST_IN_A_ROW + 4  # none was sent twice


async def test_other_routes_say_nothing_about_the_engine(make_bench):
    """vLLM's API server answers ``/tokenize`` without its engine core."""

    async def has_no_core(connection, seen):
        is_tokenize = seen.target == "/tokenize"
        await (reply(b"{}") if is_tokenize else reply(b"no", ERROR_500))(connection, seen)

    hold = Hold()
    bench = await make_bench(has_no_core, hold_then_reply(hold))
    await bench.host.set_members(2, [bench.member(1)])
    busy = bench.begin()
    await hold.entered.wait()
    await bench.host.set_members(3, [bench.member(0), bench.member(1)])
    for _ in range(MOST_IN_A_ROW):
        assert (await bench.ask(COMPLETIONS, json={"prompt": "x"})).status == 500
        if not (await bench.host.stats())["engines"][0]["is_avoided"]:
            assert (await bench.ask("/tokenize", json={"prompt": "x"})).status == 200
    assert (await bench.host.stats())["engines"][0]["is_avoided"]
    hold.opened.set()
    assert (await busy).status == 200


@pytest.mark.parametrize("keeps", ["on", "off"])
@pytest.mark.parametrize(
    ("prompt", "why"), [([1, 100], "has the id 100"), ([[1], []], "has an empty prompt")]
)
async def test_a_prompt_that_may_have_ended_its_engine_reaches_no_second_one(
    make_bench: MakeBench, keeps: str, prompt: list[Any], why: str
) -> None:
    config = router_config(token_failover=keeps)
    bench = await make_bench(die_unanswered(), die_unanswered(), config=config)
    members = [bench.member(index, vocabulary=100) for index in range(2)]
    await bench.host.set_members(2, members)
    got = await bench.ask(json={"input_ids": prompt})
    assert got.status == 400
    assert f"was lost with this request: input_ids {why}" in got.json["error"]["message"]
    assert sum(len(engine.seen) for engine in bench.engines) == 1
