"""Arenas: memory that goes, comes back, and keeps its address."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest
from engines.embedded.memory.releasable_memory import ReleasableMemory, aligned

MIB = 1 << 20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def filled(nbytes: int) -> tuple[ReleasableMemory, memoryview]:
    arena = ReleasableMemory(nbytes)
    view = arena.take(nbytes)
    view[:] = bytes(range(256)) * (nbytes // 256)
    return arena, view


@pytest.mark.parametrize("backup", [False, True])
def test_a_release_takes_the_process_less_memory(backup: bool) -> None:
    arena, _ = filled(64 * MIB)
    before = resident()
    arena.release(backup=backup)
    assert resident() < before - 60 * MIB
    assert arena.resident_bytes() == 0
    arena.resume()


def test_contents_are_equal_after_resume_with_a_backup() -> None:
    arena, view = filled(4 * MIB)
    before = bytes(view)
    arena.release(backup=True)
    assert arena.resume()
    assert bytes(view) == before


def test_contents_are_gone_after_resume_without_a_backup() -> None:
    arena, view = filled(4 * MIB)
    arena.release(backup=False)
    assert not arena.resume()
    assert not any(view)


def test_a_backup_serves_one_resume_only() -> None:
    arena, _ = filled(MIB)
    arena.release(backup=True)
    assert arena.resume()
    arena.release(backup=False)
    assert not arena.resume()


def test_resident_bytes_follow_what_was_touched() -> None:
    arena = ReleasableMemory(16 * MIB)
    assert arena.resident_bytes() == 0
    arena.take(MIB)[:] = b"x" * MIB
    assert arena.resident_bytes() == MIB


def test_pieces_start_on_cache_lines_and_end_with_the_arena() -> None:
    arena = ReleasableMemory(4096)
    arena.take(1)
    assert len(arena.take(4096 - aligned(1))) == 4096 - 64
    with pytest.raises(MemoryError, match="4096"):
        arena.take(1)


def test_touching_released_memory_ends_the_process() -> None:
    script = (
        "from engines.embedded.memory.releasable_memory import ReleasableMemory\n"
        "arena = ReleasableMemory(4096); view = arena.take(8); arena.release(backup=False); view[0]"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -11


@pytest.mark.parametrize("num_copied", [0, 1])
def test_a_backup_that_breaks_off_leaves_the_memory_and_no_file(
    monkeypatch: pytest.MonkeyPatch, num_copied: int
) -> None:
    memory = ReleasableMemory((64 << 20) + 4096)  # two parts
    memory.take(4)[:] = b"kept"
    write, done, num_files = os.pwritev, [], len(os.listdir("/proc/self/fd"))

    def full(*arguments: Any) -> int:
        if len(done) == num_copied:
            raise OSError(errno.ENOMEM, "no memory")
        done.append(arguments)
        return write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        for _ in range(3):
            with pytest.raises(OSError, match="no memory"):
                memory.release(backup=True)
            done.clear()
    assert len(os.listdir("/proc/self/fd")) == num_files
    memory.release(backup=False)
    assert not memory.resume()  # there is no backup, not even a part of one
