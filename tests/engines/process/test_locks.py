"""Folders go with the last process that holds them, however that ends, and never before."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pytest

from engines.process import locks
from engines.process.locks import held, make_held, remove_unheld
from engines.process.own_files import OwnFolder
from tests.support.line_kills import killed_at_each_line

MAKE = (
    "import os, sys, time; from pathlib import Path\n"
    "from engines.process.locks import held, make_held, remove_unheld\n"
)


def in_process(code: str, folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-c", MAKE + code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "folder"


def test_it_is_there_until_the_last_of_its_holders_lets_it_go(folder: Path) -> None:
    first = make_held(folder)
    (folder / "inner").mkdir()
    (folder / "inner" / "file").touch()
    second = held(folder)
    assert second is not None
    first.release()
    assert not remove_unheld(folder)
    assert (folder / "inner" / "file").exists()
    second.release()
    assert not folder.exists()
    second.release()
    assert held(folder) is None


def test_it_goes_at_the_end_of_a_process_that_did_not_release_it(folder: Path) -> None:
    assert in_process("hold = make_held(Path(sys.argv[1]))", folder).returncode == 0
    assert not folder.exists()


def test_what_a_killed_process_held_is_removed_by_the_next_that_looks(folder: Path) -> None:
    in_process("hold = make_held(Path(sys.argv[1])); os.kill(os.getpid(), 9)", folder)
    assert folder.exists()
    assert remove_unheld(folder)
    assert not folder.exists()


def test_a_process_that_reads_it_still_has_it_when_its_maker_was_killed(folder: Path) -> None:
    ours = make_held(folder)
    (folder / "file").touch()
    assert in_process("held(Path(sys.argv[1])); os.kill(os.getpid(), 9)", folder).returncode == -9
    assert not remove_unheld(folder)
    ours.release()
    assert not folder.exists()


def test_who_lives_in_another_pid_namespace_keeps_what_it_has(folder: Path) -> None:
    if subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip("this user may make no PID namespace")
    hold = make_held(folder)
    look = "print(remove_unheld(Path(sys.argv[1])))"
    done = in_process(look, folder, "unshare", "--pid", "--fork")
    assert done.stdout == "False\n"
    assert folder.exists()
    hold.release()


def test_a_forked_child_holds_nothing_and_removes_nothing(folder: Path) -> None:
    hold = make_held(folder)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        hold.release()
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        assert folder.exists()
        hold.release()
        assert not folder.exists()
    finally:
        os.close(write)
        os.waitpid(child, 0)


def strangers_folder(folder: Path) -> None:
    folder.mkdir()
    (folder / "file").touch()


def link_to_a_folder(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    make_held(elsewhere).release()
    elsewhere.mkdir()
    (elsewhere / ".held").touch()
    folder.symlink_to(elsewhere)


def folder_of_another_user(folder: Path) -> None:
    folder.mkdir()
    (folder / ".held").touch()
    if os.getuid():
        pytest.skip("only root gives folders away")
    os.chown(folder, 12345, 12345)


@pytest.mark.parametrize("make", [strangers_folder, link_to_a_folder, folder_of_another_user])
def test_what_is_not_ours_is_left_alone(make: Callable[[Path], None], folder: Path) -> None:
    make(folder)
    assert not remove_unheld(folder)
    assert list(folder.iterdir())


def test_a_file_system_without_locks_leaves_what_others_may_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    hold = make_held(folder)
    assert held(folder) is None
    assert not remove_unheld(folder)
    hold.release()
    assert not folder.exists()


def test_a_folder_that_is_taken_for_a_leftover_while_it_is_made_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, num_removed = fcntl.flock, 0

    def after_removal(descriptor: int, operation: int) -> None:
        nonlocal num_removed
        if operation == fcntl.LOCK_SH and num_removed < 2:
            num_removed += 1
            with monkeypatch.context() as undone:
                undone.setattr("fcntl.flock", lock)
                assert remove_unheld(folder)
        lock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", after_removal)
    hold = make_held(folder)
    assert num_removed == 2
    assert hold.is_intact()
    hold.release()
    assert not folder.exists()


def test_a_folder_that_was_replaced_is_not_removed_for_the_one_that_was_held(folder: Path) -> None:
    old = make_held(folder)
    shutil.rmtree(folder)
    new = make_held(folder)
    assert not old.is_intact()
    old.release()
    assert new.is_intact()
    new.release()


def test_what_was_to_be_rescued_stays_with_all_if_it_cannot_be(folder: Path) -> None:
    in_process("hold = make_held(Path(sys.argv[1])); os.kill(os.getpid(), 9)", folder)

    def fail(found: Path) -> None:
        assert found == folder
        raise OSError("no room")

    assert not remove_unheld(folder, fail)
    assert remove_unheld(folder)


@pytest.mark.parametrize(
    "function",
    [OwnFolder.make.__func__, OwnFolder.remove, locks._let_go],
    ids=["make", "remove", "let go"],
)
def test_a_kill_at_any_line_leaves_nothing_that_is_not_removed(
    function: FunctionType, folder: Path
) -> None:
    def run() -> None:
        hold = make_held(folder)
        (folder / "inner").mkdir()
        (folder / "inner" / "file").touch()
        (folder / "file").touch()
        hold.release()

    num_left = 0
    for is_killed in killed_at_each_line(function, run):
        num_left += folder.exists()
        assert is_killed or not folder.exists()
        assert remove_unheld(folder) == folder.exists() or not folder.exists()
        assert not folder.exists()
    assert num_left > 1
