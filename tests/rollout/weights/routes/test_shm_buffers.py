"""Slots in tmpfs: taken once, reused, and gone afterwards."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from rollout.core.errors import WeightsUnavailable
from rollout.core.machine import Room, room_on, why_no_room
from rollout.weights.format.bucket_layout import LayoutCache, lay_out
from rollout.weights.format.manifest import TensorSpec
from rollout.weights.routes.buffers import (
    FILE_NAME,
    SPARE_BYTES,
    ShmBufferPool,
    remove_leftovers,
)


def inode(folder: Path) -> int:
    return (folder / FILE_NAME).stat().st_ino


def test_a_slot_that_was_given_back_is_taken_again_with_its_memory(tmp_path: Path) -> None:
    pool = ShmBufferPool(tmp_path)
    first = pool.take(5000)
    first.view[:3] = b"abc"
    before = inode(first.folder)
    other = pool.take(5000)
    assert other.folder != first.folder
    pool.give(first)
    again = pool.take(5000)
    assert again is first
    assert inode(again.folder) == before
    assert pool.num_bytes() == 10_000
    pool.close()


@pytest.mark.parametrize("damage", ["removed", "folder removed", "cut", "replaced"])
def test_a_file_that_another_process_damaged_is_made_anew(tmp_path: Path, damage: str) -> None:
    pool = ShmBufferPool(tmp_path)
    slot, whole = pool.take(5000), pool.take(5000)
    file = slot.folder / FILE_NAME
    pool.give(slot)
    pool.give(whole)
    match damage:
        case "removed":
            file.unlink()
        case "folder removed":
            shutil.rmtree(pool.folder)
        case "cut":
            os.truncate(file, 10)
        case "replaced":
            file.rename(tmp_path / "elsewhere")
            file.write_bytes(bytes(5000))
    taken = [pool.take(5000) for _ in range(2)]
    assert slot not in taken
    assert (whole in taken) == (damage != "folder removed")
    for number, one in enumerate(taken):
        one.view[:3] = b"ab%d" % number
        assert (one.folder / FILE_NAME).read_bytes() == b"ab%d" % number + bytes(4997)
    assert not file.exists()
    pool.close()


def test_buffers_are_joined_in_a_folder_of_links_that_goes_with_the_pool(tmp_path: Path) -> None:
    pool = ShmBufferPool(tmp_path)
    slots = [pool.take(5000) for _ in range(2)]
    slots[1].view[:3] = b"abc"
    folder = pool.join([slot.folder for slot in slots])
    first, second = sorted(folder.glob("*.safetensors"))
    assert (first.resolve(), second.resolve()) == tuple(one.folder / FILE_NAME for one in slots)
    assert second.read_bytes()[:3] == b"abc"
    pool.close()
    assert not folder.exists()


def test_its_file_is_as_long_as_asked_and_its_space_is_taken(tmp_path: Path) -> None:
    pool = ShmBufferPool(tmp_path)
    slot = pool.take(1 << 20)
    stat = (slot.folder / FILE_NAME).stat()
    assert stat.st_size == 1 << 20
    assert stat.st_blocks * 512 >= 1 << 20
    assert len(slot.view) == slot.num_bytes == 1 << 20
    pool.close()


def test_what_does_not_fit_is_refused_before_anything_is_taken(tmp_path: Path) -> None:
    pool = ShmBufferPool(tmp_path)
    with pytest.raises(WeightsUnavailable, match=r"no room for a bucket of .* free and .* needed"):
        pool.take(1 << 60)
    assert not list(tmp_path.rglob(FILE_NAME))
    pool.close()


def test_slots_of_other_sizes_make_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ShmBufferPool(tmp_path)
    old = pool.take(5000)
    pool.give(old)
    monkeypatch.setattr(
        "rollout.weights.routes.buffers.why_no_room",
        lambda more, room, spare_bytes: "full" if old.folder.exists() else "",
    )
    new = pool.take(6000)
    assert not old.folder.exists()
    assert new.num_bytes == pool.num_bytes() == 6000
    pool.close()


def test_memory_that_engines_have_still_mapped_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ShmBufferPool(tmp_path)
    pool.give(pool.take(5000))
    asked = []

    def full_four_times(more: int, room: Room, spare_bytes: int) -> str:
        asked.append(more)
        return "full" if len(asked) <= 4 else ""

    monkeypatch.setattr("rollout.weights.routes.buffers.why_no_room", full_four_times)
    assert pool.take(6000).num_bytes == pool.num_bytes() == 6000
    assert asked == [6000] * 5
    pool.close()


def test_room_that_nothing_was_removed_for_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ShmBufferPool(tmp_path)
    monkeypatch.setattr(
        "rollout.weights.routes.buffers.time.sleep", lambda _: pytest.fail("it waited")
    )
    monkeypatch.setattr("rollout.weights.routes.buffers.why_no_room", lambda *_, **__: "full")
    with pytest.raises(WeightsUnavailable, match="full"):
        pool.take(6000)
    pool.close()


def test_a_closed_pool_leaves_nothing(tmp_path: Path) -> None:
    pool = ShmBufferPool(tmp_path)
    pool.take(100)
    pool.give(pool.take(100))
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_trainer_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    code = (
        "import os, sys; from rollout.weights.routes.buffers import ShmBufferPool\n"
        "pool = ShmBufferPool(sys.argv[1]); pool.take(100); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=30)
    assert len(list(tmp_path.iterdir())) == 1
    pool = ShmBufferPool(tmp_path)
    pool.take(100)
    assert list(tmp_path.iterdir()) == [pool.folder]
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [pool.folder]
    pool.close()


def test_files_of_another_version_of_the_library_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / f"rollout-push-{os.getpid()}-1732475000.12-0a1b2c3d"
    other.mkdir()
    (other / "000001").mkdir()
    assert remove_leftovers(tmp_path) == 0
    assert list(tmp_path.iterdir()) == [other]


def test_a_process_that_ends_by_itself_leaves_nothing(tmp_path: Path) -> None:
    module = "rollout.weights.routes.buffers"
    code = f"import sys; from {module} import ShmBufferPool\nShmBufferPool(sys.argv[1]).take(100)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=30)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_removes_nothing(tmp_path: Path) -> None:
    pool = ShmBufferPool(tmp_path)
    slot = pool.take(100)
    child = os.fork()
    if not child:
        pool.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert slot.folder.exists()
    pool.close()


def test_what_a_buffer_may_have_is_what_it_is_not_refused(tmp_path: Path) -> None:
    room = room_on(tmp_path)
    assert why_no_room(1, room, spare_bytes=SPARE_BYTES) == ""
    assert "--shm-size" in why_no_room(1 << 60, room, spare_bytes=SPARE_BYTES)
    for spare_bytes in (SPARE_BYTES, 1 << 60):
        most = room.usable_bytes(spare_bytes)
        assert most == 0 or not why_no_room(most, room, spare_bytes=spare_bytes)
        assert why_no_room(most + 1, room, spare_bytes=spare_bytes)


def test_the_layouts_of_buckets_are_kept_and_made_anew_for_others() -> None:
    layouts = LayoutCache(partial(lay_out, stays=True))
    specs = [TensorSpec("a", "float32", (2,)), TensorSpec("b", "bfloat16", (3, 1))]
    first = layouts.of(specs)
    assert layouts.of(list(specs)) is first
    assert first == lay_out(specs, stays=True)
    other = [TensorSpec("a", "float32", (2,)), TensorSpec("b", "bfloat16", (1, 3))]
    assert layouts.of(other).header != first.header
    assert layouts.of(specs) == first
