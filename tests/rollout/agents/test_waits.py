"""No agent waits for another: every route gets its largest inputs while a heartbeat beats.

The worker is a process of its own, whose event loop beats every 2 ms (``measured_waits``), in front
of a router in a process of its own.

Scaled for CI: 8 sessions of 64 k tokens for 1 000, since what a worker holds is measured for each
byte of 64 of their turns.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.router.agents import corpus, history, write_model
from rollout.agents.model.call_forms import FORMS
from rollout.agents.worker.app import agents_app
from rollout.agents.worker.settings import WorkerSettings
from rollout.config import AgentsConfig
from tests.rollout.router.router_process import RouterProcess
from tests.rollout.router.stub_engine import STREAM, Connection, Seen, StubEngine, chunk
from tests.support.agent_process import WorkerProcess
from tests.support.measured_waits import Waits, events_of, measuring

pytest.importorskip("tokenizers")
pytestmark = [pytest.mark.clock, pytest.mark.slow]

WAIT_S = 0.1
"""A parser reads 8 MiB in one piece; the router has a process for that."""
PER_HELD_BYTE = 8.0
NUM_SESSIONS, NUM_TOKENS, NUM_BRANCHES = 8, 65_536, 8
LONGEST = 8 << 20
SHORT = 100 << 10
BESIDE_S = 0.5
MIB = float(1 << 20)
CHAT = "/sessions/{}/v1/chat/completions"


@dataclass
class Bench:
    """A worker under measurement.

    Attributes:
        folder: of its model.
        router: in front of its engines.
    """

    it: Waits
    folder: Path
    router: RouterProcess

    def answer(self, text: str, num_events: int) -> list[bytes]:
        """The events of an answer of at most ``NUM_TOKENS`` tokens of a text."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        ids = tokenizer.encode(text[: 8 * NUM_TOKENS], add_special_tokens=False).ids
        return events_of(text[:NUM_TOKENS], num_events, ids[:NUM_TOKENS])

    async def chat(self, session: str, messages: list[dict[str, Any]], **more: Any) -> int:
        body = {"messages": messages, **more}
        return await self.it.post(CHAT.format(session), body)

    async def step(self, name: str, session: str, *messages: Any, **more: Any) -> int:
        status: int = await self.it.step(name, self.chat(session, list(messages), **more))
        return status


@asynccontextmanager
async def benches(folder: Path) -> AsyncIterator[Bench]:
    """A worker of its own in front of a router with two engines."""
    model = write_model(folder / "model")

    async def serve(connection: Connection, seen: Seen) -> None:
        events = bench.it.events
        if b'"stream":true' not in seen.body[:2000] + seen.body[-2000:]:
            events = events[-1:]
        await connection.send(STREAM, *events)
        await connection.send(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")

    async with AsyncExitStack() as stack:
        engines = [StubEngine(f"e-{number}", serve) for number in range(2)]
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        router = RouterProcess(
            max_held_requests=4096,
            max_body_bytes=64 << 20,
            request_timeout_s=300.0,
            hold_timeout_s=300.0,
        )
        await stack.enter_async_context(router)
        ports = [[number, engine.endpoint.port] for number, engine in enumerate(engines)]
        await router.call("members", 1, ports)
        await router.call("gate", "open")
        worker = WorkerProcess(
            router.endpoint.url,
            folder / "agents",
            tokenizer_path=str(model),
            max_session_bytes=1 << 30,
        )
        await stack.enter_async_context(worker)
        it = await stack.enter_async_context(measuring(worker, WAIT_S))
        bench = Bench(it, model, router)
        use_short_answers(bench)
        yield bench


def use_short_answers(bench: Bench) -> None:
    bench.it.events = events_of("an answer of some words. " * 8, 4)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def of_length(text: str, num: int) -> str:
    return (text * (num // len(text) + 1))[:num]


@pytest.mark.timeout(600)
async def test_no_agent_waits_for_another(tmp_path: Path) -> None:
    text = corpus()
    async with benches(tmp_path) as bench:
        await bench.it.step("nothing", asyncio.sleep(0.5))
        await check_largest_chats(bench, text)
        await check_routes(bench)
        await check_sessions(bench)
        await check_degenerate_answers(bench)
        await check_long_answers(bench)
        app = agents_app(WorkerSettings(AgentsConfig(), 0, 1, str(tmp_path / "unused")), "")
        assert bench.it.unmeasured(app) == []


async def check_largest_chats(bench: Bench, text: str) -> None:
    """Chats of 8 MiB in all the ways in which they can be long."""
    assert await bench.step("the first chat", "warm", user("a")) == 200
    num = LONGEST - (LONGEST >> 3)  # JSON has the text's lines with a backslash each
    long = of_length(text, num)
    messages = [user(long[at : at + 7000]) for at in range(0, num - 9000, 7000)]
    many = [user("a word " * 64)] * (1 << 14)
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call] * (num // 100)}
    deep = "[" * 100_000 + "]" * 100_000
    nested = {"a": [{"b": [0] * 100}] * 1000}
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": nested}}
        for number in range(2)
    ]
    image = {"type": "image_url", "image_url": {"url": "data:" + "a" * num}}
    parts = [{"type": "text", "text": "some words "}] * (num // 40)
    chats: dict[str, tuple[list[Any], dict[str, Any], int]] = {
        "long messages": (messages, {}, 200),
        "many messages": (many, {}, 200),
        "too many messages": ([user("")] * (num // 36), {}, 400),
        "one message of code": ([user(long)], {}, 200),
        "one message of words": ([user("some words " * (num // 11))], {}, 200),
        "one message of a letter": ([user("a" * num)], {}, 200),
        "one message of parts": ([user(parts)], {}, 200),
        "many calls": ([user("a"), calls, user("b")], {}, 200),
        "an image": ([user([image])], {}, 400),
        "many tools": ([user("a")], {"tools": tools}, 200),
        "too many tools": ([user("a")], {"tools": tools * 8}, 400),
        "many options": ([user("a")], {"chat_template_kwargs": {"a": [nested] * 16}}, 200),
    }
    for number, (name, (chat, more, expected)) in enumerate(chats.items()):
        status = await bench.step(f"8 MiB: {name}", f"long-{number}", *chat, **more)
        assert status == expected, name
    for number, name in enumerate(("long messages", "one message of code")):
        chat = [*chats[name][0], {"role": "assistant", "content": bench_answer()}, user("and?")]
        assert await bench.step(f"8 MiB, again: {name}", f"long-{3 * number}", *chat) == 200
    for name, body in (
        ("deep JSON", b'{"messages": %s}' % deep.encode()),
        ("no JSON", b'{"messages": "%s' % (b"x" * num)),
        ("numbers", b'{"messages": [%s1]}' % (b"123456789012345678901234567890, " * (num // 32))),
        ("one number", b'{"messages": %s}' % (b"1" * num)),
    ):
        chatting = bench.it.post(CHAT.format("bad"), body)
        assert await bench.it.step(f"8 MiB: {name}", chatting) == 400, name


def bench_answer() -> str:
    return "an answer of some words. " * 8


async def check_routes(bench: Bench) -> None:
    """All other routes, with the longest sessions."""
    it = bench.it
    for path in ("/sessions/long-0", "/sessions/long-3", "/health", "/metrics"):
        assert await it.step(f"GET {path}", it.get(path)) == 200
    for path in ("/v1/models", "/sessions/long-0/v1/models"):
        await it.step(f"GET {path}", it.get(path))
    for path in ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"):
        await it.step(f"GET {path}", it.get(path))
    prompt = {"prompt": "x" * (LONGEST >> 1)}
    posting = it.post("/sessions/long-0/v1/completions", prompt)
    assert await it.step("completions", posting) == 400
    for path in ("/sessions/long-0", "/sessions/long-3"):
        assert await it.step(f"DELETE {path}", it.get(path, "DELETE")) == 200


async def check_sessions(bench: Bench) -> None:
    """Sessions of 64 k tokens, and what a worker holds of them while their turns are held."""
    it, first = bench.it, history(bench.folder, NUM_TOKENS)
    histories = [[*first] for _ in range(NUM_SESSIONS)]
    answer = {"role": "assistant", "content": bench_answer()}

    async def turn(number: int, branch: int = 0) -> int:
        question = f"question {len(histories[number])} of {number}, {branch}"
        messages = [*histories[number], user(question)]
        status = await bench.chat(f"s-{number}", messages, stream=number % 2 == 0)
        if not branch:
            histories[number] = [*messages, answer]
        return status

    async def all_turns(num_branches: int = 1) -> set[int]:
        places = product(range(NUM_SESSIONS), range(num_branches))
        return set(await asyncio.gather(*(turn(*place) for place in places)))

    for name in ("first", "second", "third"):
        assert await it.step(f"{name} turn of all sessions", all_turns()) == {200}
    await bench.router.call("gate", "holding")
    before = (await it.program.call("measure"))["now"]
    num_bytes = NUM_BRANCHES * sum(len(json.dumps(messages)) for messages in histories)
    turns = asyncio.ensure_future(all_turns(NUM_BRANCHES))
    while (await bench.router.call("stats"))["gate"]["num_held"] < NUM_BRANCHES * NUM_SESSIONS:
        pass
    taken = (await it.program.call("measure"))["now"] - before
    per_byte = taken / num_bytes
    print(f"held turns: {taken / MIB:.0f} MiB for {num_bytes / MIB:.0f}: {per_byte:.1f} a byte")
    assert per_byte < PER_HELD_BYTE

    async def open_gate() -> set[int]:
        await bench.router.call("gate", "open")
        return await turns

    assert await it.step("the gate opens for them", open_gate()) == {200}


async def check_degenerate_answers(bench: Bench) -> None:
    """A model that writes one part of a call without end, for each form of calls."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for form in FORMS:
        await bench.it.program.call("form", form.name)
        begin = next(iter(form.blocks), "<|start|>")
        for unit in (begin, "\n", '{"name": "'):
            bench.it.events = bench.answer(begin + unit * NUM_TOKENS, 8)
            for stream in (False, True):
                name = f"{form.name}: {unit!r:.16}" + ", streamed" * stream
                more = {"tools": tools, "stream": stream}
                assert await bench.step(name, form.name, user("a"), **more) == 200
    use_short_answers(bench)


async def check_long_answers(bench: Bench) -> None:
    """Answers of as many tokens as a session has, of which each event has all so far."""
    bench.it.events = bench.answer("word " * NUM_TOKENS, 32)
    for stream, logprobs in product((False, True), repeat=2):
        name = "long answer" + ", streamed" * stream + ", log-probs" * logprobs
        more = {"max_tokens": NUM_TOKENS, "stream": stream, "logprobs": logprobs}
        assert await bench.step(name, "long", user("a"), **more) == 200
    use_short_answers(bench)


@pytest.mark.timeout(600)
async def test_short_chats_beside_the_longest(tmp_path: Path) -> None:
    """Of other sessions of the same worker: by how much longer each takes."""
    text = corpus()
    one, long = [user(of_length(text, SHORT))], of_length(text, LONGEST - (LONGEST >> 3))
    messages = [user(long[at : at + 7000]) for at in range(0, len(long), 7000)]
    async with benches(tmp_path) as bench:
        it = bench.it

        async def took_s(session: str, chat: list[dict[str, Any]]) -> float:
            began_s = time.monotonic()
            assert await bench.chat(session, chat) == 200
            return time.monotonic() - began_s

        async def beside(name: str, num: int, chat: list[dict[str, Any]]) -> tuple[float, float]:
            """The slowest of the short chats, and of the longest."""
            greedy = [
                asyncio.create_task(took_s(f"{name}-greedy-{number % num}", chat))
                for number in range(4)
            ]
            others: list[float] = []
            while not all(task.done() for task in greedy):
                others.append(await took_s(f"{name}-other-{len(others)}", one))
            return max(others), max(await asyncio.gather(*greedy))

        chats = {"messages": messages, "text": [user(long)]}
        for num, (name, chat) in product((1, 4), chats.items()):
            alone = sorted([await took_s(f"{num}-{name}-alone-{at}", one) for at in range(11)])[5]
            step = f"{name} of {num} sessions"
            slowest, all_s = await it.step(step, beside(f"{num}-{name}", num, chat))
            print(f"a short chat takes {alone:.3f} s alone, at most {slowest:.3f} s beside them")
            assert slowest - alone < BESIDE_S * it.slowness
            assert slowest < all_s / 4, "it waits for one of them"
