"""Bytes of a file to their places in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.embedded.memory.batched_copy import read_copies

pytestmark = pytest.mark.embedded
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


def check(descriptor: int, pieces: list[tuple[int, int]]) -> None:
    targets = [torch.zeros(num_bytes, dtype=torch.uint8) for _, num_bytes in pieces]
    copies = [
        (target.data_ptr(), offset, num_bytes)
        for target, (offset, num_bytes) in zip(targets, pieces, strict=True)
    ]
    read_copies(descriptor, copies)
    for target, (offset, num_bytes) in zip(targets, pieces, strict=True):
        assert bytes(target.tolist()) == CONTENT[offset : offset + num_bytes]


PIECES = {
    "one": [(3, 10)],
    "in a row": [(0, 5), (5, 1), (6, 500)],
    "with a gap": [(0, 5), (6, 5), (11, 5)],
    "backwards": [(100, 7), (0, 5)],
    "to the end": [(0, 1), (1, len(CONTENT) - 1)],
    "more than one call takes": [(4 * index, 4) for index in range(2500)],
    "none": [],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_every_piece_is_read_to_its_place(descriptor: int, pieces: list[tuple[int, int]]) -> None:
    check(descriptor, pieces)


@pytest.mark.parametrize("most", [1, 3, 4, 7])
def test_a_call_that_reads_less_than_asked_is_gone_on_with(
    descriptor: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.preadv

    def some(opened: int, places: Any, offset: int) -> int:
        left, fewer = most, []
        for place in places:
            fewer.append(memoryview(place)[:left])
            left -= len(fewer[-1])
        return whole(opened, fewer, offset)

    monkeypatch.setattr(os, "preadv", some)
    check(descriptor, [(0, 2), (2, 1), (3, 6), (9, 4)])


@pytest.mark.parametrize("offset", [len(CONTENT) - 3, len(CONTENT), len(CONTENT) + 9])
def test_a_file_that_is_too_short_is_an_error(descriptor: int, offset: int) -> None:
    target = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(OSError, match="early"):
        read_copies(
            descriptor, [(target.data_ptr(), offset, 4), (target.data_ptr(), offset + 4, 4)]
        )
