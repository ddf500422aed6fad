"""Files in memory: where they begin, who sees what is written, and when they go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.tensors.file_mapping import LARGE_PAGE_BYTES, FileMapping


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.truncate(descriptor, 10_000)
    yield descriptor
    os.close(descriptor)


def maps_of(descriptor: int) -> int:
    inode = f" {os.fstat(descriptor).st_ino} "
    return sum(inode in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_it_begins_where_a_large_page_can(file: int) -> None:
    mappings = [FileMapping(file, num_bytes) for num_bytes in (1, 4096, 10_000)]
    assert all(one.address % LARGE_PAGE_BYTES == 0 for one in mappings)
    assert [len(one.view) for one in mappings] == [1, 4096, 10_000]
    assert maps_of(file) == 3


def test_what_is_written_is_in_the_file_and_the_other_way_round(file: int) -> None:
    mapping = FileMapping(file, 10_000)
    mapping.view[9_997:] = b"end"
    assert os.pread(file, 10, 9_990) == bytes(7) + b"end"
    os.pwrite(file, b"begin", 0)
    assert bytes(mapping.view[:5]) == b"begin"


def test_one_that_is_only_read_cannot_be_written(file: int) -> None:
    mapping = FileMapping(file, 10_000, is_writable=False)
    with pytest.raises(TypeError, match="read-only"):
        mapping.view[0] = 1


@pytest.mark.parametrize("is_writable", [True, False])
def test_it_stays_until_nothing_views_it(file: int, is_writable: bool) -> None:
    mapping = FileMapping(file, 10_000, is_writable=is_writable)
    piece = memoryview(mapping.view[:100])
    mapping.close()
    assert maps_of(file) == 1
    assert piece[0] == 0
    piece.release()
    del mapping, piece
    assert maps_of(file) == 0


def test_closing_it_unmaps_it_at_once(file: int) -> None:
    mapping = FileMapping(file, 10_000)
    mapping.close()
    assert maps_of(file) == 0


def test_what_cannot_be_mapped_is_an_error_and_takes_no_room(file: int, tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for descriptor, num_bytes in ((other, 4096), (file, 1 << 60)):
        with pytest.raises(OSError, match=r"."):
            FileMapping(descriptor, num_bytes)
    os.close(other)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before
