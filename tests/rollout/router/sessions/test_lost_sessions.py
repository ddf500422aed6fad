"""A session whose router was lost is refused by name, until it is closed."""

from __future__ import annotations

from engines.protocol import FinishReason
from rollout.router.sessions.messages import history_of
from rollout.router.sessions.session_store import SessionStore
from rollout.router.sessions.tree import Generated, Prompt
from rollout.router.state.state_file import StateFile


def store_of(state: StateFile) -> SessionStore:
    other = StateFile(state.path)
    store = SessionStore(max_bytes=1 << 20, max_sessions=10, ttl_s=60.0, state=other)
    store.load(other.records())
    return store


def take_turn(store: SessionStore, name: str) -> None:
    session = store.begin_turn(name, 0.0)
    history = history_of([{"role": "user", "content": "one"}], None)
    made = Generated([3], [-1.0], (), FinishReason("stop", 3, ""), "x")
    session.tree.add(history, Prompt(None, [1, 2]), made, {"role": "assistant", "content": "x"})
    store.end_turn(name, session, 1.0)


def test_a_session_of_a_lost_router_is_refused_by_name_until_it_is_closed() -> None:
    state = StateFile.make()
    first = store_of(state)
    for name in ("lost", "closed"):
        take_turn(first, name)
    assert first.close("closed")
    second = store_of(state)
    assert "session lost was lost with its router" in second.why_closed("lost")
    assert second.why_lost("closed") == second.why_closed("new") == ""
    assert second.close("lost")
    assert store_of(state).why_lost("lost") == ""
    state.close()
