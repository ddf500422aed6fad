"""What others put at a name of ours is left as it is, and what a process uses is not removed."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.process import own_files
from engines.process.guard import remove_files
from engines.process.locks import FileLock, held, make_held, own_folder, remove_unheld
from engines.process.own_files import (
    NotOurs,
    OwnFolder,
    make_folders,
    new_file,
    open_or_new_file,
    remove_unused_file,
)
from rollout.core.errors import WeightsUnavailable
from rollout.weights.store.node.base_folder import make_private_folder
from tests.support.processes import wait_until

STRANGER = 12345
APART = ["unshare", "--pid", "--ipc", "--mount", "--fork", "--kill-child", sys.executable, "-c"]


def link_to_a_folder(at: Path) -> None:
    at.symlink_to(at.parent / "victim")


def link_to_a_file(at: Path) -> None:
    at.symlink_to(at.parent / "victim" / "file")


def link_to_nothing(at: Path) -> None:
    at.symlink_to(at.parent / "victim" / "made")


def folder_of_another_user(at: Path) -> None:
    at.mkdir()
    (at / ".held").touch()
    (at / "theirs").touch()
    os.chown(at, STRANGER, STRANGER)


def file_of_another_user(at: Path) -> None:
    at.write_text("theirs")
    os.chown(at, STRANGER, STRANGER)


def pipe(at: Path) -> None:
    os.mkfifo(at)


STRANGERS = [
    link_to_a_folder,
    link_to_a_file,
    link_to_nothing,
    folder_of_another_user,
    file_of_another_user,
    pipe,
]
# How the name is used, and the errors by which it is refused.
USERS: dict[str, tuple[Callable[[Path], object], type[Exception] | tuple[type[Exception], ...]]] = {
    "make a folder": (lambda at: OwnFolder.make(str(at)), FileExistsError),
    "open a folder": (lambda at: OwnFolder.open(str(at)), (NotOurs, FileNotFoundError)),
    "make folders": (lambda at: make_folders(str(at)), NotOurs),
    "make folders below": (lambda at: make_folders(str(at / "below")), NotOurs),
    "hold a new folder": (make_held, FileExistsError),
    "hold a folder that stays": (own_folder, OSError),
    "make a file": (lambda at: new_file(str(at)), FileExistsError),
    "open a file": (lambda at: open_or_new_file(str(at)), (NotOurs, IsADirectoryError)),
    "lock a file": (FileLock, (NotOurs, IsADirectoryError)),
    "a folder of the store": (make_private_folder, WeightsUnavailable),
}


def all_below(folder: Path) -> list[tuple[str, int, int, int]]:
    """What there is, whose, and when it was changed."""
    found = []
    for path in sorted(folder.rglob("*")):
        seen = path.lstat()
        found.append((str(path), seen.st_mode, seen.st_uid, seen.st_mtime_ns))
    return found


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that everybody can write, with something of a stranger in it."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    (folder / "victim").mkdir(mode=0o755)
    (folder / "victim" / "file").write_text("not ours")
    (folder / "victim" / ".held").touch()
    if os.getuid() == 0:
        for path in (folder / "victim", folder / "victim" / "file"):
            os.chown(path, STRANGER, STRANGER)
    return folder


def planted(plant: Callable[[Path], None], at: Path) -> None:
    if os.getuid() and plant in (folder_of_another_user, file_of_another_user):
        pytest.skip("only root gives files away")
    plant(at)
    if os.getuid() == 0:
        os.chown(at, STRANGER, STRANGER, follow_symlinks=False)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("plant", STRANGERS, ids=lambda plant: plant.__name__)
def test_a_strangers_name_is_refused_and_nothing_of_it_changes(
    plant: Callable[[Path], None], user: str, shared: Path
) -> None:
    if os.getuid():
        pytest.skip("what is planted must be of another user")
    at = shared / "rollout-name"
    planted(plant, at)
    before = all_below(shared)
    use, refusals = USERS[user]
    with pytest.raises(refusals) as refused:
        use(at)
    if isinstance(refused.value, NotOurs | WeightsUnavailable):
        for named in (str(at), f"uid {STRANGER}", "mode 0"):
            assert named in str(refused.value)
    assert held(at) is None
    assert not remove_unheld(at)
    assert not remove_unheld(at, is_known=True)
    assert not remove_unused_file(str(at))
    assert all_below(shared) == before


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_folder_in_which_others_may_write_is_not_opened(mode: int, shared: Path) -> None:
    folder = OwnFolder.make(str(shared / "ours"))
    folder.close()
    (shared / "ours").chmod(mode)
    with pytest.raises(NotOurs, match=f"with mode {mode:04o}"):
        OwnFolder.open(str(shared / "ours"))
    assert not remove_unheld(shared / "ours")


def test_a_link_of_ours_to_a_folder_of_ours_may_be_a_run(shared: Path) -> None:
    (shared / "elsewhere").mkdir()
    (shared / "run").symlink_to(shared / "elsewhere")
    make_folders(str(shared / "run" / "policy" / "logs"))
    assert (shared / "elsewhere" / "policy" / "logs").is_dir()
    made = shared / "elsewhere" / "policy", shared / "elsewhere" / "policy" / "logs"
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def test_a_file_system_that_gives_what_root_makes_to_another_user_is_used(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with ``root_squash``, seen from the other side: we are not who owns all of it."""
    folder = shared / "checkpoints"
    folder.mkdir()
    monkeypatch.setattr(own_files.os, "getuid", lambda: os.geteuid() + 1)
    make_folders(str(folder / "run"))
    hold = make_held(folder / "push")
    os.close(open_or_new_file(str(folder / "file")))
    assert not remove_unheld(folder / "push")
    hold.release()
    assert not (folder / "push").exists()


def test_links_in_a_folder_of_ours_are_removed_and_not_followed(shared: Path) -> None:
    hold = make_held(shared / "ours")
    (shared / "ours" / "inner").mkdir()
    for where in ("to-victim", "inner/to-victim"):
        (shared / "ours" / where).symlink_to(shared / "victim")
    hold.release()
    assert sorted(os.listdir(shared)) == ["victim"]
    assert (shared / "victim" / "file").read_text() == "not ours"


def test_a_folder_that_was_replaced_by_a_link_is_not_removed_through_it(shared: Path) -> None:
    hold = make_held(shared / "ours")
    (shared / "ours").rename(shared / "moved")
    (shared / "ours").symlink_to(shared / "victim")
    assert not hold.is_intact()
    hold.release()
    assert (shared / "victim" / "file").exists()
    assert (shared / "ours").is_symlink()


def test_a_small_file_is_replaced_whole_or_not_at_all(shared: Path) -> None:
    """A file system with one free page: a write there does not end where it began."""
    (shared / "ours").mkdir()
    mount = 'mount -t tmpfs -o size=8k,mode=0700 none . && cd "$PWD" && exec "$@"'
    mounted = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", REPLACE],
        cwd=shared / "ours",
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=False,
    )
    if "mount" in mounted.stderr:
        pytest.skip("this user may mount nothing")
    assert mounted.stdout.split() == ["ENOSPC", "b'first'", "['record']"], mounted.stderr


REPLACE = """
import errno, os
from engines.process.own_files import OwnFolder
folder = OwnFolder.open(os.getcwd())
folder.replace("record", b"first")
try:
    folder.replace("record", bytes(7516))
except OSError as error:
    print(errno.errorcode[error.errno])
print(folder.read("record", 100), [name for name in os.listdir()])
"""


def test_a_small_file_is_bounded_and_no_link(shared: Path) -> None:
    folder = OwnFolder.make(str(shared / "ours"))
    folder.replace("record", b"12345")
    assert folder.read("record", 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        folder.read("record", 4)
    (shared / "ours" / "linked").symlink_to(shared / "victim" / "file")
    with pytest.raises(OSError, match="symbolic links"):
        folder.read("linked", 100)
    folder.replace("linked", b"ours")
    assert (shared / "victim" / "file").read_text() == "not ours"
    folder.close()


# -- files that a process uses ----------------------------------------------------------------


@contextmanager
def used(how: str, file: Path, *before: str) -> Iterator[None]:
    code = f"import fcntl, mmap, os, signal; f = os.open({str(file)!r}, os.O_RDWR)\n" + how
    process = subprocess.Popen(
        [*before, sys.executable, "-c", code + "\nprint(flush=True); signal.pause()"],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            pytest.skip("this user may make no namespaces")
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("apart", [False, True], ids=["here", "another container"])
@pytest.mark.parametrize("how", ["", "m = mmap.mmap(f, 4096); os.close(f)"], ids=["open", "mapped"])
def test_a_file_that_a_process_uses_is_not_removed(how: str, apart: bool, shared: Path) -> None:
    file = shared / "rollout-file"
    file.write_bytes(bytes(4096))
    with used(how, file, *(APART[:-2] if apart else [])):
        assert not remove_unused_file(str(file))
        assert file.exists()
    # Of a container, the last process ends a little later.
    assert wait_until(lambda: remove_unused_file(str(file)), 20)
    assert not file.exists()
    assert remove_unused_file(str(file))


def test_who_opens_a_file_while_it_is_looked_at_ends_no_process(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel sends SIGIO to who has a lease that another process breaks."""
    file = shared / "rollout-file"
    file.write_bytes(bytes(4096))
    same = os.path.samestat

    def meanwhile(*stats: os.stat_result) -> bool:
        opened = "import os, sys; os.open(sys.argv[1], os.O_RDWR | os.O_NONBLOCK)"
        subprocess.run([sys.executable, "-c", opened, str(file)], check=False, timeout=30)
        return same(*stats)

    monkeypatch.setattr(own_files.os.path, "samestat", meanwhile)
    assert signal.getsignal(signal.SIGIO) is signal.SIG_DFL
    assert remove_unused_file(str(file))


def test_a_file_that_is_older_than_the_engine_stays(shared: Path) -> None:
    """The same pid was another process before, or is one in another container."""
    file = shared / "sgl_shm_x_4242_y"
    file.touch()
    pattern = str(shared / "sgl_shm_*_4242_*")
    assert remove_files([pattern], time.time() + 60) == [str(file)]
    assert file.exists()
    assert remove_files([pattern], time.time() - 60) == []
    assert not file.exists()


def test_a_lock_of_a_folder_is_seen_from_another_container(shared: Path) -> None:
    folder = OwnFolder.make(str(shared / "ours"), fcntl.LOCK_EX)
    look = (
        "import sys; from pathlib import Path; from engines.process.locks import remove_unheld;"
        "print(remove_unheld(Path(sys.argv[1])))"
    )
    command = [*APART, look, str(shared / "ours")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if not done.stdout:
        pytest.skip("this user may make no namespaces")
    assert done.stdout == "False\n"
    folder.close()
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "True\n"


def test_memory_of_a_mapped_file_is_ours(shared: Path) -> None:
    descriptor = new_file(str(shared / "file"))
    os.ftruncate(descriptor, 4096)
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    mmap.mmap(descriptor, 4096).close()
    os.close(descriptor)
