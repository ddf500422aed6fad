"""Headers of safetensors files: what was written is read, what is damaged is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from engines.tensors.safetensors_header import (
    Header,
    PlacedTensor,
    SafetensorsError,
    make_header,
    parse_header,
    read_header,
)

TENSORS = [
    ("a", "float32", (2, 3)),
    ("b", "bfloat16", (5,)),
    ("none", "int8", (0, 4)),
    ("c", "bool", ()),
]


def written(folder: Path, content: bytes) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(content)
    return file


def read(file: Path) -> Header:
    with file.open("rb") as stream:
        return read_header(file, stream.fileno())


def header_of(**entries: Any) -> Header:
    return parse_header("model.safetensors", json.dumps(entries).encode())


def entry(begin: Any, end: Any, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def test_a_header_that_was_written_is_read(tmp_path: Path) -> None:
    content, places = make_header(TENSORS, metadata={"format": "pt"}, alignment=64)
    assert len(content) % 64 == 0
    header = read(written(tmp_path, content + bytes(35)))
    assert header.num_bytes == len(content)
    assert header.metadata == {"format": "pt"}
    assert header.specs() == TENSORS
    assert header.placed(len(content) + 35) == [
        PlacedTensor(name, dtype, shape, places[name][0], places[name][1] - places[name][0])
        for name, dtype, shape in TENSORS
    ]


@pytest.mark.embedded
def test_the_safetensors_library_reads_what_was_written(tmp_path: Path) -> None:
    from safetensors import safe_open

    content, _ = make_header(TENSORS, metadata={"format": "pt"})
    with safe_open(written(tmp_path, content + bytes(35)), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == {  # noqa: SIM118
            name: list(shape) for name, _, shape in TENSORS
        }


def test_a_dtype_that_no_file_can_hold_is_not_written() -> None:
    with pytest.raises(ValueError, match="'a' is complex64, which a safetensors file cannot hold"):
        make_header([("a", "complex64", (1,))])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it has only 0 bytes"),
        (b"1234", "it has only 4 bytes"),
        (struct.pack("<Q", 10**9) + b"{}", "its header would have 1000000000 bytes"),
        (struct.pack("<Q", 20) + b"{}", "it ends after 2 of the 20 bytes of its header"),
        (struct.pack("<Q", 4) + b"oops", "its header is not JSON"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "its header is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "its header is not a JSON object"),
        (struct.pack("<Q", 18) + b'{"__metadata__":7}', "its __metadata__ is not"),
    ],
)
def test_what_is_no_header_is_named_with_its_file(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    file = written(tmp_path, content)
    with pytest.raises(SafetensorsError, match=f"^{file} is not a safetensors file: {reason}"):
        read(file)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (1, "has no dtype and shape"),
        ({}, "has no dtype and shape"),
        (entry(0, 4, shape=[-4]), "has no dtype and shape"),
        (entry(0, 4, shape=["4"]), "has no dtype and shape"),
        (entry(0, 4, shape=4), "has no dtype and shape"),
        ({"dtype": "U8", "shape": [4]}, "has no pair of data_offsets"),
        (entry(0, 4) | {"data_offsets": [4]}, "has no pair of data_offsets"),
        (entry(0, 4) | {"data_offsets": [0.0, 4.0]}, "has no pair of data_offsets"),
        (entry(0, 4) | {"data_offsets": 4}, "has no pair of data_offsets"),
        (entry(0, 9), "ends at byte 9 and begins at byte 0; the file has 8 bytes of data"),
        (entry(-4, 0), "ends at byte 0 and begins at byte -4"),
        (entry(8, 4, shape=[0]), "ends at byte 4 and begins at byte 8"),
        (entry(0, 4, dtype="F4"), "has an unknown dtype 'F4'; known: "),
        (entry(0, 4, dtype="F32", shape=[2]), "has 4 bytes, float32 of shape .2. makes 8"),
    ],
)
def test_a_wrong_entry_is_named_with_its_tensor_and_file(wrong: Any, reason: str) -> None:
    header = header_of(right=entry(0, 4), wrong=wrong)
    with pytest.raises(
        SafetensorsError,
        match=f"^model.safetensors is not a safetensors file: tensor 'wrong' {reason}",
    ):
        header.placed(header.num_bytes + 8)


def test_tensors_that_overlap_are_named() -> None:
    header = header_of(first=entry(4, 8), second=entry(0, 6))
    with pytest.raises(SafetensorsError, match="tensor 'first' overlaps 'second'"):
        header.placed(header.num_bytes + 8)


def test_an_empty_tensor_overlaps_none() -> None:
    header = header_of(whole=entry(0, 8), empty=entry(4, 4))
    assert [tensor.name for tensor in header.placed(header.num_bytes + 8)] == ["whole", "empty"]


def test_an_unknown_dtype_keeps_its_word_where_no_bytes_are_read() -> None:
    assert header_of(a=entry(0, 4, "F4", [8])).specs() == [("a", "F4", (8,))]
