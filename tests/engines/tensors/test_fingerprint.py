"""What a fingerprint of bytes covers, and that fingerprints of two kinds are never compared."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.tensors.fingerprint import (
    host_fingerprint,
    host_fingerprint_of,
    start,
    sums_fingerprint,
    way_of,
    whole_fingerprint,
)

DATA = bytes(range(48))
BASE = ("layers.0.weight", "float32", (3, 4))


@pytest.mark.parametrize(
    "other",
    [
        ("layers.1.weight", "float32", (3, 4)),
        ("layers.0.weight", "int32", (3, 4)),
        ("layers.0.weight", "float32", (4, 3)),
        ("layers.0.weight", "float32", (12,)),
    ],
)
def test_name_dtype_and_shape_count(other: tuple[str, str, tuple[int, ...]]) -> None:
    assert host_fingerprint(*other, DATA) != host_fingerprint(*BASE, DATA)


def test_it_is_the_same_on_every_machine() -> None:
    # A constant: stores and trainers of other versions of this library compare with it.
    found = host_fingerprint(*BASE, DATA)
    assert found == "xxh3:ebbbe6cfe353850ca0cbb1057b0731db"


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_pieces_of_any_size_make_the_same_fingerprint(data: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[one:two] for one, two in itertools.pairwise(edges)]
    hasher = start("a", "uint8", (len(data),))
    for piece in pieces:
        hasher.update(piece)
    whole = host_fingerprint("a", "uint8", (len(data),), data)
    assert host_fingerprint_of(hasher) == whole
    assert host_fingerprint("a", "uint8", (len(data),), *pieces) == whole


@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_flipped_bit_is_seen(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    shape = (len(data),)
    assert host_fingerprint("a", "uint8", shape, data) != host_fingerprint(
        "a", "uint8", shape, flipped
    )


def test_a_name_cannot_pass_for_a_shorter_one_with_contents() -> None:
    # What a plain "name|dtype|shape|bytes" would confuse.
    assert host_fingerprint("a", "uint8", (9,), b"|uint8|x|") != host_fingerprint(
        "a|uint8|x|", "uint8", (9,), b""
    )


def test_sums_are_bound_to_their_names_and_lengths() -> None:
    def of(*sums: tuple[str, bytes]) -> str:
        return sums_fingerprint(*BASE, sums)

    one = of(("rows", b"ab"), ("columns", b"c"))
    assert one.startswith("sums:")
    assert one != of(("rows", b"a"), ("columns", b"bc"))
    assert one != of(("columns", b"ab"), ("rows", b"c"))


def test_the_whole_does_not_depend_on_the_order_and_sees_a_swap() -> None:
    prints = {name: host_fingerprint(name, "uint8", (1,), name.encode()) for name in "ab"}
    swapped = {
        name: host_fingerprint(name, "uint8", (1,), other.encode()) for name, other in ("ab", "ba")
    }
    assert whole_fingerprint(prints) == whole_fingerprint(dict(reversed(prints.items())))
    assert whole_fingerprint(prints) != whole_fingerprint(swapped)
    assert whole_fingerprint(prints) != whole_fingerprint({"a": prints["a"]})


def test_fingerprints_of_two_kinds_are_not_compared() -> None:
    mixed = {"a": host_fingerprint(*BASE, DATA), "b": sums_fingerprint(*BASE, [])}
    with pytest.raises(ValueError, match="'a' by xxh3, 'b' by sums"):
        way_of(mixed)
    with pytest.raises(ValueError, match="'cafe' of tensor 'a' is no fingerprint"):
        whole_fingerprint({"a": "cafe"})
