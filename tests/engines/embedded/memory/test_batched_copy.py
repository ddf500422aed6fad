"""Copies by address: fewer of them, the same bytes."""

from __future__ import annotations

import ctypes

import pytest
from engines.embedded.memory.batched_copy import copy_all, joined

pytestmark = pytest.mark.embedded


@pytest.mark.parametrize(
    ("copies", "fewer"),
    [
        ([], []),
        ([(100, 0, 8), (108, 8, 4), (112, 12, 4)], [(100, 0, 16)]),
        ([(100, 0, 8), (116, 8, 4)], [(100, 0, 8), (116, 8, 4)]),
        ([(100, 0, 8), (108, 16, 4)], [(100, 0, 8), (108, 16, 4)]),
        ([(100, 0, 0), (200, 0, 8), (208, 8, 0)], [(200, 0, 8)]),
        ([(108, 8, 8), (100, 0, 8)], [(108, 8, 8), (100, 0, 8)]),
    ],
)
def test_neighbours_on_both_sides_are_one_copy(
    copies: list[tuple[int, int, int]], fewer: list[tuple[int, int, int]]
) -> None:
    assert joined(copies) == fewer


def test_every_byte_goes_to_its_place() -> None:
    source = ctypes.create_string_buffer(bytes(range(16)), 16)
    target = ctypes.create_string_buffer(20)
    at = ctypes.addressof(target)
    copies = [(at + 4, 0, 4), (at + 8, 4, 4), (at, 12, 4)]
    copy_all(ctypes.addressof(source), joined(copies))
    assert target.raw == bytes([12, 13, 14, 15, *range(8)]) + bytes(8)
