from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.tensors import file_space as hugepages
from engines.tensors.file_mapping import FileMapping

MIB = 1 << 20


def have_large_pages() -> bool:
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return release >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").is_dir()


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def maps_of(descriptor: int) -> int:
    inode = f" {os.fstat(descriptor).st_ino} "
    return sum(inode in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("num_bytes", [1, 4096, 2 * MIB - 1, 2 * MIB, 9 * MIB + 5])
def test_all_space_is_taken_and_nothing_stays_mapped(file: int, num_bytes: int) -> None:
    hugepages.take_space(file, num_bytes)
    stat = os.fstat(file)
    assert stat.st_size == num_bytes
    assert stat.st_blocks * 512 >= num_bytes
    assert maps_of(file) == 0
    assert os.pread(file, num_bytes, 0) == bytes(num_bytes)


@pytest.mark.skipif(not have_large_pages(), reason="MADV_COLLAPSE came with Linux 6.1")
def test_space_comes_in_large_pages(file: int) -> None:
    hugepages.take_space(file, 64 * MIB)
    mapping = FileMapping(file, 64 * MIB)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith(f"{mapping.address:x}-"))
    mapped = next(line for line in lines[first:] if line.startswith("ShmemPmdMapped:"))
    # As many as the machine had to give.
    assert int(mapped.split()[1]) > 0
    mapping.close()


def test_what_was_written_stays(file: int) -> None:
    content = os.urandom(4 * MIB)
    os.pwrite(file, content, 0)
    hugepages.take_space(file, 8 * MIB)
    assert os.pread(file, 8 * MIB, 0) == content + bytes(4 * MIB)


def test_a_kernel_without_large_pages_gives_small_ones(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old:
        @staticmethod
        def madvise(*_: object) -> int:
            return -1

    monkeypatch.setattr(hugepages, "_libc", Old)
    hugepages.take_space(file, 4 * MIB)
    assert os.fstat(file).st_blocks * 512 >= 4 * MIB
    assert maps_of(file) == 0


def test_a_file_on_a_disk_is_as_good(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        hugepages.take_space(file.fileno(), 4 * MIB)
    assert path.stat().st_blocks * 512 >= 4 * MIB


def test_no_space_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match=r"large|space"):
        hugepages.take_space(file.fileno(), 1 << 60)
