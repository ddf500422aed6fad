"""The bounds of sessions, their ends, and a worker that is started again on their files."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.agents.turns.files import Found, SessionFiles, UnreadableSession, digest_of
from rollout.agents.turns.store import Session, SessionStore
from rollout.agents.turns.tree import Generated, Prompt, Turn, TurnTree
from rollout.agents.wire.messages import history_of
from tests.support.agent_turns import MOVES, STOP, facts_of, one_turn, store_in, turn_of

MakeStore = Callable[..., SessionStore]


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    """Makes the store of one folder; the one before is stopped."""
    made: list[SessionStore] = []

    def make(**bounds: Any) -> SessionStore:
        for store in made:
            store.stop()
        made[:] = [store_in(tmp_path / "0", **{"max_bytes": 1 << 20, "ttl_s": 10.0} | bounds)]
        return made[0]

    yield make
    for store in made:
        store.stop()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the sessions that were read, in order."""
    found: list[str] = []
    read = SessionFiles.read

    def noted(files: SessionFiles, session_id: str) -> Found:
        found.append(session_id)
        return read(files, session_id)

    monkeypatch.setattr(SessionFiles, "read", noted)
    return found


def files_in(folder: Path) -> list[Path]:
    return sorted((folder / "0").glob("*.jsonl"))


async def test_bytes_and_sessions_are_bounded_and_come_back_when_closed(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store(max_sessions=2)
    await one_turn(store, "a")
    await one_turn(store, "b", num_tokens=80_000)
    assert "agents.max_session_bytes" in store.why_full("a", 0.0)
    assert await store.close("b")
    assert not await store.close("b")
    assert store.why_full("c", 0.0) == ""
    await one_turn(store, "c")
    assert "agents.max_sessions" in store.why_full("d", 0.0)
    assert await store.close("a")
    assert await store.close("c")
    assert (store.num_bytes, files_in(tmp_path)) == (0, [])


async def test_an_idle_session_expires_and_one_with_a_turn_under_way_does_not(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store(max_sessions=2)
    await one_turn(store, "idle")
    await one_turn(store, "busy")
    busy = await store.begin_turn("busy", 0.0)
    store.expire(11.0)
    assert await store.get("idle") is None
    assert await store.get("busy") is busy
    store.end_turn(busy, 12.0)
    store.expire(21.0)
    assert await store.get("busy") is busy
    store.expire(23.0)
    assert store.num_bytes == 0
    store.stop()
    assert files_in(tmp_path) == []


async def test_an_expired_session_can_begin_again(make_store: MakeStore) -> None:
    store = make_store()
    await one_turn(store, "s", num_tokens=5)
    store.expire(11.0)
    await one_turn(store, "s", 11.0, num_tokens=7)
    session = await make_store().get("s")
    assert session is not None
    assert [len(turn.generated.ids) for turn in session.tree.turns] == [7]


async def test_as_many_closed_ids_are_remembered_as_sessions_may_be_open(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store(max_sessions=3)
    for number in range(20):
        await one_turn(store, f"s-{number}")
        assert await store.close(f"s-{number}")
        assert (tmp_path / "0" / "closed").stat().st_size <= 2 * 3 * 16
        closed = [bool(store.why_closed(f"s-{one}")) for one in range(20)]
        if number % 4 == 3:
            store = make_store(max_sessions=3)
        assert closed == [bool(store.why_closed(f"s-{one}")) for one in range(20)]
        assert closed == [number - 3 < one <= number for one in range(20)]


async def test_an_id_that_is_no_sessions_is_not_remembered_and_displaces_none(
    make_store: MakeStore,
) -> None:
    store = make_store(max_sessions=3)
    await one_turn(store, "mine")
    await store.close("mine")
    assert not any([await store.close(f"unknown-{number}") for number in range(10)])
    assert store.why_closed("mine")
    assert not store.why_closed("unknown-9")


async def test_a_session_without_a_turn_ends_with_its_last_request(make_store: MakeStore) -> None:
    """So refused requests take no room."""
    store = make_store(max_sessions=1)
    one, two = await store.begin_turn("a", 0.0), await store.begin_turn("a", 0.0)
    assert one is two
    store.end_turn(one, 1.0)
    assert store.why_full("b", 1.0)
    store.end_turn(two, 1.0)
    assert (await store.get("a"), store.num_bytes, store.why_full("b", 1.0)) == (None, 0, "")


async def test_sessions_that_expire_together_are_deleted_some_at_a_time(
    make_store: MakeStore,
) -> None:
    store = make_store()
    for number in range(100):
        await one_turn(store, str(number))
    num_sweeps = 0
    while await store.get("99") is not None:
        store.expire(20.0)
        num_sweeps += 1
    assert (num_sweeps, store.num_bytes) == (4, 0)


# -- turns that end at the same time ----------------------------------------------------------


async def test_turns_that_end_together_are_lines_in_the_order_of_their_numbers(
    make_store: MakeStore,
) -> None:
    store = make_store()
    nums = [3000, 1, 50, 2, 4000, 1]
    turns = await asyncio.gather(*(one_turn(store, "s", num_tokens=num) for num in nums))
    assert sorted(turn.number for turn in turns) == list(range(6))
    before = await store.get("s")
    after = await make_store().get("s")
    assert before is not None
    assert after is not None
    assert facts_of(after.tree) == facts_of(before.tree)


def begin_keeping(store: SessionStore, session: Session) -> asyncio.Task[Turn]:
    made = Generated([1, 2], [-0.5, -1.0], (), STOP, "x")
    history = history_of([{"role": "user", "content": "a"}], None)
    answer = {"role": "assistant", "content": "x"}
    return asyncio.ensure_future(store.keep(session, history, Prompt(None, [3]), made, answer))


async def test_a_turn_whose_caller_leaves_is_kept_whole(make_store: MakeStore) -> None:
    store = make_store()
    session = await store.begin_turn("s", 0.0)
    keeping = begin_keeping(store, session)
    await asyncio.sleep(0)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    store.end_turn(session, 0.0)
    assert session.tree.turns == []
    await one_turn(store, "s")
    assert len(session.tree.turns) == 2
    after = await make_store().get("s")
    assert after is not None
    assert facts_of(after.tree) == facts_of(session.tree)


async def test_a_session_that_is_closed_as_its_turns_end_leaves_no_file(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store()
    session = await store.begin_turn("s", 0.0)
    keeping, waiting = begin_keeping(store, session), begin_keeping(store, session)
    await asyncio.sleep(0)
    assert await store.close("s")
    assert [(await keeping).number, (await waiting).number] == [0, 1]
    store.end_turn(session, 0.0)
    assert store.num_bytes == 0
    store.stop()
    assert files_in(tmp_path) == []


async def test_a_turn_that_cannot_be_written_is_not_kept(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    await one_turn(store, "s")
    before = store.num_bytes

    def is_full(descriptor: int, pieces: list[bytes]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "writev", is_full)
        for name in ("s", "other"):
            with pytest.raises(OSError, match="No space left on device"):
                await one_turn(store, name)
        assert await store.get("other") is None
    assert store.num_bytes == before
    turn = await one_turn(store, "s")
    assert turn.number == 1
    after = await make_store().get("s")
    assert after is not None
    assert len(after.tree.turns) == 2


async def test_a_worker_that_stops_writes_the_turns_that_it_has(make_store: MakeStore) -> None:
    store = make_store()
    session = await store.begin_turn("s", 0.0)
    other = await store.begin_turn("other", 0.0)
    keeping, late = begin_keeping(store, session), begin_keeping(store, session)
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the first one is to be written, and the second one waits for it
    store.stop()
    store.end_turn(other, 0.0)
    assert (await keeping).number == 0
    with pytest.raises(OSError, match="stops"):
        await late
    after = await make_store().get("s")
    assert after is not None
    assert len(after.tree.turns) == 1


# -- a worker that is started again -----------------------------------------------------------


@given(
    st.lists(st.one_of(MOVES, st.sampled_from(["close 0", "close 1", "restart"])), max_size=12),
    st.data(),
)
def test_a_worker_that_is_killed_continues_with_all_whole_turns(
    moves: list[Any], data: st.DataObject
) -> None:
    """Any turns, branches, ends and restarts; then the last write to a file is cut off."""
    with TemporaryDirectory() as folder:
        asyncio.run(_continues(Path(folder), moves, data))


async def _continues(folder: Path, moves: list[Any], data: st.DataObject) -> None:
    store, trees, closed = store_in(folder), {}, set()
    for move in moves:
        if move == "restart":
            num_bytes = store.num_bytes
            store.stop()
            store = store_in(folder)
            assert store.num_bytes == num_bytes
        elif isinstance(move, str):
            assert await store.close(move[-1]) == (trees.pop(move[-1], None) is not None)
            closed |= {move[-1]} if store.why_closed(move[-1]) else set()
        elif str(move[0]) not in closed:
            name = str(move[0])
            session = await store.begin_turn(name, 0.0)
            turn = await store.keep(session, *turn_of(session.tree, move))
            store.end_turn(session, 0.0)
            tree = trees.setdefault(name, TurnTree())
            tree.add(turn)
    store.stop()
    if trees:
        name = data.draw(st.sampled_from(sorted(trees)))
        path = folder / f"{digest_of(name).hex()}.jsonl"
        content = path.read_bytes()
        last = content.rindex(b"\n", 0, -1) + 1
        os.truncate(path, data.draw(st.integers(last, len(content) - 1)))
        whole = TurnTree()
        for turn in trees[name].turns[:-1]:
            whole.add(turn)
        trees[name] = whole
    store = store_in(folder)
    for name in "012":
        assert bool(store.why_closed(name)) == (name in closed)
        found = await store.get(name)
        tree = trees.get(name, TurnTree())
        assert (found is None) == (not tree.turns)
        if found is not None:
            assert facts_of(found.tree) == facts_of(tree)
    num_bytes = store.num_bytes
    store.stop()
    # A torn line is still there, and is not counted again.
    store = store_in(folder)
    assert [await store.get(name) is None for name in "012"] == [
        not trees.get(name, TurnTree()).turns for name in "012"
    ]
    assert store.num_bytes == num_bytes
    store.stop()


async def test_sessions_of_before_are_counted_and_not_read(
    make_store: MakeStore, reads: list[str]
) -> None:
    store = make_store(max_sessions=2)
    await one_turn(store, "a", num_tokens=70_000)
    await one_turn(store, "b")
    before = store.num_bytes
    assert before >= 1 << 20
    store = make_store(max_sessions=2)
    assert store.num_bytes == before
    assert "agents.max_session_bytes" in store.why_full("a", 0.0)
    await store.close("a")
    assert store.why_full("b", 0.0) == ""
    await one_turn(store, "c")
    store = make_store(max_sessions=2)
    assert "agents.max_sessions" in store.why_full("d", 0.0)
    assert store.why_full("b", 0.0) == ""
    assert reads == []
    assert await store.get("b") is not None
    assert reads == ["b"]


async def test_a_session_of_before_is_as_old_as_its_file(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store()
    for name in ("old", "young", "next"):
        await one_turn(store, name)
    store.stop()
    for name, age_s in (("old", 60.0), ("next", -60.0)):
        path = tmp_path / "0" / f"{digest_of(name).hex()}.jsonl"
        at_s = path.stat().st_mtime - age_s
        os.utime(path, (at_s, at_s))
    store = make_store(now_s=1000.0)
    store.expire(1000.0)
    found = [await store.get(name) for name in ("old", "young", "next")]
    assert [session is not None for session in found] == [False, True, True]
    store.expire(1011.0)
    assert store.num_bytes == 0


async def test_the_file_of_a_closed_session_is_removed_by_the_next_worker(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store()
    await one_turn(store, "s")
    (path,) = files_in(tmp_path)
    content = path.read_bytes()
    await store.close("s")
    path.write_bytes(content)  # as it is where the worker is killed before it removes it
    store = make_store()
    assert store.why_closed("s")
    assert await store.get("s") is None
    store.stop()
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("is_read_by_a_turn", [False, True])
async def test_a_damaged_session_is_refused_until_it_is_closed(
    make_store: MakeStore, tmp_path: Path, is_read_by_a_turn: bool
) -> None:
    store = make_store()
    for _ in range(2):
        await one_turn(store, "s")
    before = store.num_bytes
    (path,) = files_in(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(b"drift")] ^= 1
    path.write_bytes(content)
    store = make_store()
    for _ in range(2):
        with pytest.raises(UnreadableSession, match=f"{path}, line 2"):
            await (one_turn(store, "s") if is_read_by_a_turn else store.get("s"))
    assert store.num_bytes == before
    assert path.read_bytes() == content
    assert await store.close("s")
    assert (store.num_bytes, files_in(tmp_path)) == (0, [])


async def test_requests_that_name_a_session_together_read_it_once(
    make_store: MakeStore, reads: list[str]
) -> None:
    store = make_store()
    await one_turn(store, "s")
    store = make_store()
    one, two = await asyncio.gather(store.get("s"), store.begin_turn("s", 0.0))
    assert one is two
    assert reads == ["s"]


async def test_what_a_session_stays_with_is_there_behind_a_restart(make_store: MakeStore) -> None:
    store = make_store()
    for name, pinned in (("adapter", ("a@5",)), ("base", (None,)), ("free", ())):
        session = await store.begin_turn(name, 0.0)
        session.pinned = pinned
        await one_turn(store, name)
        store.end_turn(session, 0.0)
    store = make_store()
    found = [await store.get(name) for name in ("adapter", "base", "free")]
    assert [one and one.pinned for one in found] == [("a@5",), (None,), ()]


async def test_the_next_worker_has_the_versions_that_sessions_stay_with(
    make_store: MakeStore, tmp_path: Path, reads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Before it reads a session; what has no turn stays with nothing."""
    store = make_store()
    for name in ("kept", "closed", "empty", "damaged"):
        session = await store.begin_turn(name, 0.0)
        await store.stay(session, f"{name}@5")
        if name != "empty":
            await one_turn(store, name)
    await store.close("closed")
    (tmp_path / "0" / f"{digest_of('damaged').hex()}.pin").write_bytes(b"{")
    store = make_store()
    assert store.staying() == [(digest_of("kept"), "kept@5")]
    assert "damaged" not in caplog.text
    assert ".pin: " in caplog.text
    assert reads == []
    store.stop()
    left = {path.stem for path in (tmp_path / "0").glob("*.pin")}
    assert left == {digest_of(name).hex() for name in ("kept", "damaged")}
