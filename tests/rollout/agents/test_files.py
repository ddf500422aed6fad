"""Turns in files: what is read is what was written, wherever the writing was cut off."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.process.own_files import NotOurs
from rollout.agents.model.alignment import Drift
from rollout.agents.turns import files as files_module
from rollout.agents.turns.files import (
    FolderInUse,
    SessionFiles,
    UnreadableSession,
    digest_of,
    first_line,
    line_of,
    read_lines,
)
from rollout.agents.turns.tree import Generated, TurnTree
from tests.support.agent_turns import (
    MOVES,
    STOP,
    facts,
    facts_of,
    one_turn,
    store_in,
    turn_of,
)

ROOT = Path(__file__).parents[3]
SESSION = "a/../b\N{PILE OF POO}"


def written(tree: TurnTree, session_id: str = SESSION) -> list[bytes]:
    return [b"".join(first_line(session_id))] + [
        b"".join(line_of(turn, ("a@7",))) for turn in tree.turns
    ]


def tree_of(moves: list[Any]) -> TurnTree:
    tree = TurnTree()
    for move in moves:
        tree.add(tree.made(*turn_of(tree, move)))
    return tree


def lines_in(data: bytes) -> list[bytes]:
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


@given(st.lists(MOVES, max_size=6))
def test_what_is_read_is_what_was_written(moves: list[Any]) -> None:
    tree = tree_of(moves)
    lines = written(tree)
    assert all(line.count(b"\n") == 1 for line in lines)
    for turn, line in zip(tree.turns, lines[1:], strict=True):
        assert len(line) >= turn.num_bytes
    found = read_lines("f", SESSION, lines)
    assert facts_of(found.tree) == facts_of(tree)
    assert found.num_bytes == sum(map(len, lines))
    assert found.pinned == (("a@7",) if moves else ())


@given(st.lists(MOVES, max_size=4), st.data())
def test_a_last_line_that_is_cut_off_is_not_there(moves: list[Any], data: st.DataObject) -> None:
    *lines, last = written(tree_of(moves))
    end = data.draw(st.integers(0, len(last) - 1))
    found = read_lines("f", SESSION, lines_in(b"".join(lines) + last[:end]))
    assert found.num_bytes == sum(map(len, lines))
    assert facts_of(found.tree) == facts_of(tree_of(moves[:-1]))


@pytest.mark.parametrize("num_turns", [0, 2])
def test_a_last_line_may_be_cut_off_anywhere(num_turns: int) -> None:
    tree = TurnTree()
    for _ in range(num_turns):
        tree.add(tree.made(*a_turn()))
    *lines, last = written(tree)
    whole = [facts(turn) for turn in tree.turns[:-1]]
    for end in range(len(last)):
        found = read_lines("f", SESSION, [*lines, last[:end]] if end else lines)
        assert found.num_bytes == sum(map(len, lines))
        assert [facts(turn) for turn in found.tree.turns] == whole


@given(st.lists(MOVES, min_size=1, max_size=4), st.data())
def test_damage_is_refused_by_its_line_unless_it_is_in_the_last(
    moves: list[Any], data: st.DataObject
) -> None:
    lines = written(tree_of(moves))
    whole = b"".join(lines)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[at] ^= data.draw(st.integers(1, 255))
    ends = [sum(map(len, lines[: num + 1])) for num in range(len(lines))]
    number = next(num for num, end in enumerate(ends, 1) if at < end)
    lines_read = lines_in(bytes(damaged))
    # A last line that is cut in two by the damage is not known to be the last.
    if number < len(lines) or (damaged[at] == ord("\n") and at < len(whole) - 1):
        with pytest.raises(UnreadableSession, match=f"^/the/file, line {number}: "):
            read_lines("/the/file", SESSION, lines_read)
    else:
        found = read_lines("/the/file", SESSION, lines_read)
        assert found.num_bytes == ends[-2]
        assert facts_of(found.tree) == facts_of(tree_of(moves[:-1]))


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([b"".join(first_line("other"))], "line 1: it is of session 'other'"),
        (
            [b"".join(files_module._line({"format": 2, "session_id": SESSION}))],
            "line 1: it has format 2, and this program reads 1",
        ),
        (
            [b"".join(first_line(SESSION)), b"".join(first_line(SESSION))],
            "line 2: 'logprob_kind'",
        ),
    ],
)
def test_whole_lines_that_are_not_of_the_session_are_refused(lines: list[bytes], why: str) -> None:
    with pytest.raises(UnreadableSession, match=why):
        read_lines("f", SESSION, lines)


def test_damage_between_the_last_two_lines_does_not_hide_the_first_of_them() -> None:
    tree = TurnTree()
    for _ in range(2):
        tree.add(tree.made(*a_turn()))
    first, second, last = written(tree)
    with pytest.raises(UnreadableSession, match="f, line 2: its end is damaged"):
        read_lines("f", SESSION, [first, second[:-1] + b"x" + last])


def test_lines_in_another_order_are_refused() -> None:
    tree = TurnTree()
    for _ in range(2):
        tree.add(tree.made(*a_turn()))
    first, *turns = written(tree)
    with pytest.raises(UnreadableSession, match="line 2: turn 1 follows 0 turns"):
        read_lines("f", SESSION, [first, *turns[::-1]])


def a_turn(**more: Any) -> tuple[Any, Any, Any, Any]:
    made = Generated([5, 6], [float("nan"), float("-inf")], (), STOP, "text", **more)
    history, prompt, _, answer = turn_of(
        TurnTree(), (0, -1, "a", [1, 2], Drift.CLEAN, None, (), made)
    )
    return history, prompt, made, answer


@pytest.mark.parametrize("num", [0, 1, 4, 5, 12])
def test_long_values_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    monkeypatch.setattr(files_module, "_PIECE", 6)
    monkeypatch.setattr(files_module, "_TEXT_PIECE", 8)
    tree = TurnTree()
    tree.add(tree.made(*a_turn(experts=bytes(range(num)))))
    assert facts_of(read_lines("f", SESSION, written(tree)).tree) == facts_of(tree)


# -- files ------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Any:
    made = SessionFiles(str(tmp_path / "agents" / "0"))
    yield made
    made.close()


def appended(files: SessionFiles, tree: TurnTree, at: int) -> int:
    turn = tree.made(*a_turn())
    num = files.append(SESSION, turn, None, at)
    tree.add(turn)
    return num


def test_turns_are_appended_and_a_clients_text_is_no_path(files: SessionFiles) -> None:
    tree, at = TurnTree(), 0
    for _ in range(3):
        at = appended(files, tree, at)
    path = Path(files.path_of(digest_of(SESSION)))
    assert (path.stat().st_size, path.stat().st_mode & 0o777) == (at, 0o600)
    assert {entry.name for entry in path.parent.iterdir()} == {path.name, ".held"}
    found = files.read(SESSION)
    assert (found.num_bytes, facts_of(found.tree)) == (at, facts_of(tree))
    files.remove(digest_of(SESSION))
    files.remove(digest_of(SESSION))
    assert not path.exists()
    with pytest.raises(UnreadableSession, match="it is gone"):
        files.read(SESSION)


def fails(number: int) -> Callable[..., int]:
    def fail(descriptor: int, pieces: list[bytes]) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def writes_a_part_and_fails(descriptor: int, pieces: list[bytes]) -> int:
    os.write(descriptor, b"".join(pieces)[:-3])
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def writes_a_part(descriptor: int, pieces: list[bytes]) -> int:
    return os.write(descriptor, b"".join(pieces)[:-3])


BAD_WRITES = [fails(errno.ENOSPC), fails(errno.EIO), writes_a_part_and_fails, writes_a_part]


@pytest.mark.parametrize("write", BAD_WRITES)
@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "cannot be cut"])
def test_a_write_that_fails_leaves_the_turns_before_it(
    files: SessionFiles,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[..., int],
    num_before: int,
    is_cut: bool,
) -> None:
    tree, at = TurnTree(), 0
    for _ in range(num_before):
        at = appended(files, tree, at)
    with monkeypatch.context() as broken:
        broken.setattr(os, "writev", write)
        if not is_cut:
            broken.setattr(os, "ftruncate", fails(errno.EIO))
        with pytest.raises(OSError, match=str(files.path_of(digest_of(SESSION)))):
            appended(files, tree, at)
    if is_cut:
        assert os.stat(files.path_of(digest_of(SESSION))).st_size == at
    appended(files, tree, appended(files, tree, at))
    assert facts_of(files.read(SESSION).tree) == facts_of(tree)


def test_a_file_that_became_shorter_takes_no_turn(files: SessionFiles) -> None:
    at = appended(files, TurnTree(), 0)
    os.truncate(files.path_of(digest_of(SESSION)), at - 1)
    with pytest.raises(OSError, match=f"it has {at - 1} bytes, and had {at}"):
        appended(files, TurnTree(), at)


def test_a_link_in_the_place_of_a_file_is_refused_and_left(
    files: SessionFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"kept")
    path = Path(files.path_of(digest_of(SESSION)))
    path.symlink_to(other)
    with pytest.raises(NotOurs, match="is a link"):
        appended(files, TurnTree(), 0)
    with pytest.raises(OSError, match=path.name):
        files.read(SESSION)
    with pytest.raises(NotOurs, match="is a link"):
        files.remove(digest_of(SESSION))
    assert list(files.listed()) == []
    assert f"{path} is a link" in caplog.text
    assert path.is_symlink()
    assert other.read_bytes() == b"kept"


def test_a_folder_is_one_processes_alone(files: SessionFiles) -> None:
    folder = str(Path(files.path_of(b"")).parent)
    with pytest.raises(FolderInUse, match="give each worker a folder of its own"):
        SessionFiles(folder)
    files.close()
    SessionFiles(folder).close()


def test_a_folder_that_others_may_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(NotOurs, match="0777"):
        SessionFiles(str(tmp_path / "open"))


def test_closed_ids_are_written_behind_whole_ones(files: SessionFiles) -> None:
    assert files.closed(10) == ([], 0)
    digests = [bytes([number]) * 16 for number in range(5)]
    path = Path(files.path_of(b"")).with_name("closed")
    for digest in digests[:4]:
        files.add_closed(digest)
    os.truncate(path, 3 * 16 + 5)  # killed as it wrote the last one
    assert files.closed(10) == (digests[:3], 3)
    files.add_closed(digests[4])
    assert files.closed(2) == ([digests[2], digests[4]], 4)
    files.replace_closed(digests[:2])
    assert files.closed(10) == (digests[:2], 2)


# -- a killed worker --------------------------------------------------------------------------


@pytest.mark.parametrize("num_answered", [1, 7, 20])
def test_a_killed_worker_leaves_each_turn_that_it_answered(
    tmp_path: Path, num_answered: int
) -> None:
    command = [sys.executable, "-m", "tests.support.agent_turns", str(tmp_path / "0")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        answered = [worker.stdout.readline() for _ in range(num_answered)]
        with pytest.raises(FolderInUse):
            SessionFiles(str(tmp_path / "0"))
        worker.send_signal(signal.SIGKILL)
        answered += worker.stdout.read().splitlines(keepends=True)
    turns = [tuple(map(int, line.split())) for line in answered if line.endswith("\n")]
    asyncio.run(_check_turns(tmp_path / "0", turns))


async def _check_turns(folder: Path, answered: list[tuple[int, ...]]) -> None:
    store = store_in(folder)
    for number in range(3):
        session = await store.get(f"s-{number}")
        kept = [] if session is None else session.tree.turns
        assert {turn for one, turn in answered if one == number} <= set(range(len(kept)))
        for turn in kept:
            assert len(turn.generated.ids) == 20_000 + number + 3 * turn.number
            assert set(turn.generated.logprobs) == {-0.1}
        await one_turn(store, f"s-{number}")
    store.stop()
