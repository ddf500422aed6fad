"""The folder of the store has a name that everyone can predict: only ours is used or swept."""

import os
from pathlib import Path

import pytest

from rollout.config import StoreConfig
from rollout.core.errors import WeightsUnavailable
from rollout.weights.store.agents import StoreTerms
from rollout.weights.store.node.agent import AgentSettings, StoreAgent
from rollout.weights.store.node.base_folder import Leftovers, locked, remove_links, why_not_private
from rollout.weights.store.node.files import Files

STRANGER = 12345

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give files to another")


def start(base: Path) -> StoreAgent:
    return StoreAgent(AgentSettings("node-0", str(base), "run", spare_bytes=0))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Files that no store may touch."""
    for name in ("alice/thesis.txt", "bob/data/numbers"):
        path = tmp_path / "home" / name
        path.parent.mkdir(parents=True)
        path.write_text("kept")
    return tmp_path / "home"


def is_whole(home: Path) -> bool:
    return [path.read_text() for path in sorted(home.rglob("*")) if path.is_file()] == ["kept"] * 2


@needs_root
def test_a_folder_of_another_user_is_refused_by_name_and_nothing_behind_its_link_is_removed(
    shared_memory: Path, home: Path
) -> None:
    base = shared_memory / "base"
    base.mkdir()
    base.chmod(0o777)
    (base / "x").symlink_to(home)
    os.chown(base, STRANGER, STRANGER)
    with pytest.raises(WeightsUnavailable) as refused:
        start(base)
    assert is_whole(home)
    assert os.listdir(base) == ["x"]
    for part in (str(base), f"uid {STRANGER}", "mode 0777", "remove it", "weights.store.path"):
        assert part in str(refused.value)


def test_a_folder_that_is_a_link_is_refused_by_name_and_its_target_stays(
    shared_memory: Path, home: Path
) -> None:
    base = shared_memory / "base"
    base.symlink_to(home)
    with pytest.raises(
        WeightsUnavailable, match=r"base is a link, .*remove it.*weights.store.path"
    ):
        start(base)
    assert is_whole(home)
    assert sorted(os.listdir(home)) == ["alice", "bob"]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o1777])
def test_a_folder_that_others_may_enter_is_refused_by_its_mode(
    mode: int, shared_memory: Path, home: Path
) -> None:
    base = shared_memory / "base"
    base.mkdir()
    base.chmod(mode)
    (base / "x").symlink_to(home)
    with pytest.raises(WeightsUnavailable, match=f"with mode {mode:04o};"):
        start(base)
    assert is_whole(home)
    assert os.listdir(base) == ["x"]


def test_a_link_inside_our_folder_is_not_followed(shared_memory: Path, home: Path) -> None:
    base = shared_memory / "base"
    base.mkdir(mode=0o700)
    (base / "x").symlink_to(home)
    (base / "crashed").mkdir()
    (base / "crashed" / "node-0").symlink_to(home)
    agent = start(base)
    agent.close(clear=True)
    assert is_whole(home)
    assert (base / "x").is_symlink()
    assert (base / "crashed" / "node-0").is_symlink()
    (base / ".held").unlink()


@pytest.mark.parametrize("link", ["run", "run/node-0", "run/node-0/slotA"])
def test_a_run_that_is_a_link_is_refused_and_not_filled(
    link: str, shared_memory: Path, home: Path
) -> None:
    base = shared_memory / "base"
    at = base / link
    files = Files()
    for folder in reversed(at.parents):
        if folder.is_relative_to(base):
            files.make_folder(folder)
    at.symlink_to(home)
    with pytest.raises(WeightsUnavailable, match="is a link"):
        files.make_folder(at)
    assert sorted(os.listdir(home)) == ["alice", "bob"]


@needs_root
def test_a_run_of_another_user_in_our_folder_is_not_swept(shared_memory: Path) -> None:
    base = shared_memory / "base"
    (base / "theirs" / "node-0").mkdir(parents=True)
    (base / "ours" / "node-0").mkdir(parents=True)
    (base / "ours" / "node-1").mkdir(parents=True)
    base.chmod(0o700)
    for name in ("theirs", "theirs/node-0", "ours/node-1"):
        os.chown(base / name, STRANGER, STRANGER)
    with locked(base):
        assert Leftovers(base).sweep() == ["ours/node-0"]
    assert (base / "theirs" / "node-0").is_dir()
    assert (base / "ours" / "node-1").is_dir()
    (base / ".held").unlink()


def test_links_behind_a_link_are_not_removed(shared_memory: Path, home: Path) -> None:
    ours = shared_memory / "run" / "node-0"
    ours.mkdir(parents=True)
    (home / "to-ours").symlink_to(ours)
    (shared_memory / "linked").symlink_to(home)
    remove_links(shared_memory / "linked", ours)
    assert (home / "to-ours").is_symlink()


def test_the_lock_is_no_link(shared_memory: Path, home: Path) -> None:
    base = shared_memory / "base"
    base.mkdir(mode=0o700)
    (base / ".held").symlink_to(home / "made")
    with pytest.raises(OSError, match="symbolic links"), locked(base):
        pass
    assert not (home / "made").exists()


def test_a_parent_that_is_gone_ends_the_lock_with_an_error(shared_memory: Path) -> None:
    with pytest.raises(FileNotFoundError), locked(shared_memory / "gone" / "base"):
        pass


def test_a_folder_that_we_made_is_used_again(shared_memory: Path) -> None:
    base = shared_memory / "base"
    first = start(base)
    assert why_not_private(base) == ""
    assert {path.stat().st_mode & 0o777 for path in (base, base / "run")} == {0o700}
    first.close(clear=False)
    start(base).close(clear=True)
    assert not base.exists()


def test_the_folder_of_a_user_is_named_by_its_number() -> None:
    settings = StoreTerms.of(StoreConfig(), "run", "main").settings("node-0")
    assert settings.base == f"/dev/shm/rollout-store-{os.getuid()}"
