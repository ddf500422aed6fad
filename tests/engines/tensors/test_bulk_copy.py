"""Bytes in bulk, by each kind of code there is: what is copied, and what the digests are of."""

import ctypes
import math
import os
import shutil
import sysconfig
from pathlib import Path
from random import Random

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from engines.tensors import bulk_copy
from engines.tensors.fingerprint import head_of, host_fingerprint
from tests.support.kinds import not_for

PYTHON, AVX2, AVX512 = range(3)
GUARD = 200
ROOM = 1 << 16


@pytest.fixture(params=[PYTHON, AVX2, AVX512], ids=["python", "avx2", "avx512"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The code that runs."""
    wanted: int = request.param
    if wanted == PYTHON:
        monkeypatch.setattr(bulk_copy, "_library", None)
    elif wanted > bulk_copy._kind:
        pytest.skip("not compiled, or not on this processor")
    else:
        monkeypatch.setattr(bulk_copy, "_kind", wanted)
    return wanted


class Memory:
    """Bytes at an address."""

    def __init__(self, contents: bytes) -> None:
        self.contents = bytearray(contents)
        self._place = (ctypes.c_char * len(contents)).from_buffer(self.contents)
        self.address = ctypes.addressof(self._place)


def noise(size: int, seed: int = 0) -> bytes:
    return Random(seed).randbytes(size)


@pytest.fixture
def source() -> Memory:
    return Memory(noise(ROOM))


@pytest.fixture
def target() -> Memory:
    return Memory(bytes(ROOM))


SIZES = st.one_of(
    st.integers(0, 400),
    st.integers(900, 1200),
    st.integers(0, ROOM - 4 * GUARD),
    st.sampled_from([64, 1024, 2047, 2048, 2049, 4096, 16384]),
)
SHIFTS = st.integers(0, GUARD)


@given(size=SIZES, head=st.binary(max_size=300), from_=SHIFTS, to=SHIFTS)
def test_a_range_arrives_and_its_digest_is_that_of_the_library(
    size: int, head: bytes, from_: int, to: int
) -> None:
    source, target = Memory(noise(ROOM)), Memory(bytes(ROOM))
    (found,) = bulk_copy.copy_and_hash(
        [head], [target.address + GUARD + to], [source.address + from_], [size]
    )
    expected = source.contents[from_ : from_ + size]
    begin, end = GUARD + to, GUARD + to + size
    assert target.contents[begin:end] == expected
    assert not any(target.contents[:begin])
    assert not any(target.contents[end:])
    assert found == f"xxh3:{xxhash.xxh3_128(head + expected).hexdigest()}"


@given(sizes=st.lists(st.integers(0, 3000), max_size=12), gap=st.integers(0, 70))
def test_many_ranges_each_with_its_own_head(sizes: list[int], gap: int) -> None:
    source, target = Memory(noise(ROOM)), Memory(bytes(ROOM))
    offsets = [sum(sizes[:index]) + index * gap for index in range(len(sizes))]
    names = [f"layer.{index}" for index in range(len(sizes))]
    found = bulk_copy.copy_and_hash(
        [head_of(name, "uint8", (size,)) for name, size in zip(names, sizes, strict=True)],
        [target.address + offset for offset in offsets],
        [source.address + offset for offset in offsets],
        sizes,
    )
    expected = bytearray(ROOM)
    for offset, size in zip(offsets, sizes, strict=True):
        expected[offset : offset + size] = source.contents[offset : offset + size]
    assert target.contents == expected
    assert found == [
        host_fingerprint(name, "uint8", (size,), source.contents[offset : offset + size])
        for name, size, offset in zip(names, sizes, offsets, strict=True)
    ]


@given(size=SIZES, from_=SHIFTS, to=SHIFTS)
def test_copied_without_a_hash(size: int, from_: int, to: int) -> None:
    source, target = Memory(noise(ROOM)), Memory(bytes(ROOM))
    begin, end = GUARD + to, GUARD + to + size
    bulk_copy.copy_all([target.address + begin], [source.address + from_], [size])
    assert target.contents[begin:end] == source.contents[from_ : from_ + size]
    assert not any(target.contents[:begin])
    assert not any(target.contents[end:])


@not_for(PYTHON)
@given(
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    num=st.one_of(st.integers(0, 600), st.integers(2000, 5000)),
    shift=st.integers(0, 70),
    to=SHIFTS,
    bad=st.one_of(st.none(), st.tuples(st.floats(0, 1, exclude_max=True), st.booleans())),
)
def test_a_value_that_is_no_number_is_found_at_any_place(
    dtype: str, num: int, shift: int, to: int, bad: tuple[float, bool] | None
) -> None:
    """All bits of the exponent: infinite, or NaN if more bits are set; without the lowest a float32
    that bfloat16 may not have."""
    width, exponent = (4, 0x7F00_0000) if dtype == "float32" else (2, 0x7F80)
    exponent = 0x7C00 if dtype == "float16" else exponent
    lowest = exponent & -exponent  # without it, each value is a number
    values = np.frombuffer(noise(5000 * width), f"<u{width}")[:num] & ~np.array(
        lowest, f"<u{width}"
    )
    if bad is not None and num:
        share, is_nan = bad
        values[int(share * num)] = exponent | is_nan
    memory = Memory(b"\xff" * shift + values.tobytes() + b"\xff" * 200)
    places, sizes = [memory.address + shift] * 2, [values.nbytes, 0]
    expected = [bad is not None and num > 0, False]
    assert bulk_copy.suspects([dtype] * 2, places, sizes) == expected
    target = Memory(bytes(ROOM))
    targets, heads = [target.address + to, target.address + ROOM - 1], [b"head", b"none"]
    hashed = bulk_copy.copy_and_check([dtype] * 2, targets, places, sizes, heads)
    digests = [xxhash.xxh3_128(b"head" + values.tobytes()), xxhash.xxh3_128(b"none")]
    assert hashed == ([f"xxh3:{digest.hexdigest()}" for digest in digests], expected)
    assert target.contents[to : to + values.nbytes] == values.tobytes()
    target.contents[:] = bytes(ROOM)
    assert bulk_copy.copy_and_check([dtype] * 2, targets, places, sizes) == ([], expected)
    assert target.contents[to : to + values.nbytes] == values.tobytes()
    _, found = bulk_copy.copy_and_check(["int16"] * 2, targets, places, sizes)
    assert found == [False, False]


@not_for(PYTHON)
def test_no_ranges_have_no_values() -> None:
    assert bulk_copy.suspects([], [], []) == []
    assert not bulk_copy.can_check("float64", math.inf)


@not_for(PYTHON)
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        ("bfloat16", float.fromhex("0x1.fep127")),
        ("float16", 65504.0),
        ("float32", float.fromhex("0x1.fffffep126")),
    ],
)
def test_a_type_can_be_checked_up_to_what_its_bits_show(dtype: str, largest: float) -> None:
    assert bulk_copy.can_check(dtype, largest)
    assert not bulk_copy.can_check(dtype, math.nextafter(largest, 0))


def test_hashed_where_it_is(source: Memory) -> None:
    before = bytes(source.contents)
    address = source.address + 3
    found = bulk_copy.copy_and_hash([b"head"], [address], [address], [5000])
    assert found == [f"xxh3:{xxhash.xxh3_128(b'head' + before[3:5003]).hexdigest()}"]
    assert source.contents == before


@not_for(AVX2, AVX512)  # their copy cannot be put out of order
def test_a_copy_that_is_not_the_same_has_another_fingerprint_than_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the compiled code it is plain to read, and of this to try."""
    copy = ctypes.memmove
    monkeypatch.setattr(
        ctypes, "memmove", lambda target, source, size: copy(target, source, size - 1)
    )
    source, target = Memory(noise(1000)), Memory(bytes(1000))
    (found,) = bulk_copy.copy_and_hash([b"head"], [target.address], [source.address], [1000])
    assert found == f"xxh3:{xxhash.xxh3_128(b'head' + source.contents).hexdigest()}"
    assert target.contents != source.contents


def test_nothing_is_nothing() -> None:
    assert bulk_copy.copy_and_hash([], [], [], []) == []
    bulk_copy.copy_all([], [], [])


@pytest.mark.parametrize("missing", range(3))
def test_lists_that_differ_in_length_copy_nothing(
    source: Memory, target: Memory, missing: int
) -> None:
    lists = [[target.address] * 2, [source.address] * 2, [100] * 2]
    lists[missing] = lists[missing][:1]
    with pytest.raises(ValueError, match="2"):
        bulk_copy.copy_all(*lists)
    with pytest.raises(ValueError, match="2"):
        bulk_copy.copy_and_hash([b"head"] * 2, *lists)
    with pytest.raises(ValueError, match="2"):
        bulk_copy.copy_and_hash([b"head"], [target.address] * 2, [source.address] * 2, [100] * 2)
    assert not any(target.contents)


def test_a_compiler_is_not_overlooked(kind: int) -> None:
    """The code is optional: what fails to compile, or to be found, would be slow and no error."""
    if kind != PYTHON:
        assert bulk_copy.is_compiled()
    elif _has_avx2() and shutil.which("cc") and _has_headers():
        assert bulk_copy._load() is not None


def _has_avx2() -> bool:
    return " avx2 " in Path("/proc/cpuinfo").read_text()


def _has_headers() -> bool:
    return (Path(sysconfig.get_path("include")) / "Python.h").exists()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "sizes", [[], [0], [0, 0, 30], [30, 0, 0], [100, 1, 1, 1], [1, 1, 1, 100], [10] * 60]
)
def test_threads_share_neighbours_by_their_bytes(
    sizes: list[int], num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(num_threads))
    monkeypatch.setattr(bulk_copy, "_SHARE_BYTES", 9)
    shares = bulk_copy.in_threads(lambda part: list(enumerate(sizes))[part], sizes)
    assert [entry for share in shares for entry in share] == list(enumerate(sizes))
    most = max(sum(size for _, size in share) for share in shares)
    assert most <= sum(sizes) / len(shares) + max(sizes, default=0)
