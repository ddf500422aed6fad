"""The sessions of a router that is killed: another one has all turns of each, or refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import aiohttp
import pytest

from engines.protocol import FinishReason
from rollout.router.sessions.messages import Message, history_of
from rollout.router.sessions.session_store import Session, SessionStore
from rollout.router.sessions.tree import Generated, Prompt
from rollout.router.state.state_file import StateFile
from tests.rollout.router.router_process import RouterProcess
from tests.rollout.router.stub_engine import StubEngine
from tests.support.chat_models import speaking, write_chat_model
from tests.support.line_kills import killed_at_each_line

SIZE = 1 << 18
TOO_MANY = 1 << 16
FIRST = [{"role": "user", "content": "one"}]


@pytest.fixture
def state() -> Iterator[StateFile]:
    made = StateFile.make(SIZE)
    yield made
    made.close()


def store_of(state: StateFile) -> SessionStore:
    """The store of a router that takes the place of the one before."""
    other = StateFile(state.path, SIZE)
    store = SessionStore(max_bytes=SIZE, max_sessions=10, ttl_s=60.0, state=other)
    store.load(other.records(), 0.0)
    return store


def take_turn(
    store: SessionStore, name: str, messages: list[Message] = FIRST, num_tokens: int = 1
) -> Session:
    """A turn, and the answer ``x``."""
    session = store.begin_turn(name, 0.0)
    history, tree = history_of(messages, None), session.tree
    known = tree.known(history)
    made = Generated([3] * num_tokens, [-1.0] * num_tokens, (), FinishReason("stop", 3, ""), "x")
    turn = tree.add(history, Prompt(known.parent, [1, 2]), made, answer("x"))
    store.keep(name, session, turn)
    store.end_turn(name, session, 1.0)
    return session


def answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def turns_of(store: SessionStore, name: str) -> list[bytes]:
    session = store.get(name)
    return [] if session is None else [b"".join(turn.json()) for turn in session.tree.turns]


def test_a_session_has_all_turns_at_the_next_routers_and_goes_on_there(state: StateFile) -> None:
    messages, stores = FIRST, [store_of(state)]
    for num in range(1, 4):
        take_turn(stores[-1], "s", messages)
        messages = [*messages, answer("x"), {"role": "user", "content": f"more {num}"}]
        stores.append(store_of(state))
        kept = turns_of(stores[-1], "s")
        assert kept == turns_of(stores[-2], "s")
        assert len(kept) == num
        assert stores[-1].num_bytes == stores[-2].num_bytes > 0
    session = stores[-1].get("s")
    assert session is not None
    assert [turn.prompt.parent for turn in session.tree.turns] == [None, 0, 1]
    assert stores[-1].close("s")
    assert store_of(state).get("s") is None
    assert StateFile(state.path, SIZE).records() == []


def test_a_session_that_does_not_fit_is_refused_by_its_name_until_it_is_closed(
    state: StateFile,
) -> None:
    store = store_of(state)
    take_turn(store, "s")
    take_turn(store, "s", num_tokens=TOO_MANY)
    take_turn(store, "s")
    second = store_of(state)
    assert "session s was lost with its router" in second.why_closed("s")
    assert second.why_lost("new") == ""
    assert second.close("s")
    assert store_of(state).why_lost("s") == ""


def test_a_session_that_stays_with_weights_is_refused(state: StateFile) -> None:
    store = store_of(state)
    take_turn(store, "s").names = ("adapter",)
    take_turn(store, "s")
    assert "session s was lost with its router" in store_of(state).why_lost("s")


@pytest.mark.parametrize("action", ["keep", "refuse", "delete"])
def test_a_router_that_is_killed_at_any_line_leaves_whole_sessions(action: str) -> None:
    """The client has no answer of a turn that is missing."""
    function = SessionStore.delete if action == "delete" else SessionStore.keep
    found, states = set(), list[StateFile]()

    def begin() -> None:
        states.append(StateFile.make(SIZE))
        before = store_of(states[-1])
        for _ in range(2):
            take_turn(before, "s")

    def act() -> None:
        store = store_of(states[-1])
        if action == "delete":
            store.close("s")
        else:
            take_turn(store, "s", num_tokens=TOO_MANY if action == "refuse" else 1)

    begin()
    for _ in killed_at_each_line(cast(FunctionType, function), act):
        after = store_of(states[-1])
        found.add("lost" if after.why_lost("s") else len(turns_of(after, "s")))
        states.pop().close()
        begin()
    states.pop().close()
    assert found == {2, {"keep": 3, "refuse": "lost", "delete": 0}[action]}


async def test_a_chat_goes_on_at_the_router_in_the_place_of_a_killed_one(
    state: StateFile, tmp_path: Path
) -> None:
    model = write_chat_model(tmp_path)
    engine = StubEngine("e-0", speaking(model, lambda text: "an answer"))
    await engine.start()
    messages: list[Any] = FIRST
    for num in range(3):
        async with RouterProcess(state, tokenizer_path=str(model)) as router:
            await router.call("members", 1, [(0, engine.endpoint.port)])
            await router.call("gate", "open")
            async with aiohttp.ClientSession(router.endpoint.url) as client:
                body = {"messages": messages}
                async with client.post("/sessions/s/v1/chat/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    message = (await response.json())["choices"][0]["message"]
                async with client.get("/sessions/s") as response:
                    turns = (await response.json())["turns"]
            await router.kill()
        messages = [*messages, message, {"role": "user", "content": f"more {num}"}]
    await engine.stop()
    assert [(turn["parent"], turn["drift"]) for turn in turns] == [
        (None, "clean"),
        (0, "clean"),
        (1, "clean"),
    ]
