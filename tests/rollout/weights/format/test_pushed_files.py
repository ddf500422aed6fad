"""The files of a push are compared with the trainer's fingerprints, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.tensors.fingerprint import host_fingerprint
from engines.tensors.safetensors_header import make_header
from rollout.weights.format.pushed_files import why_damaged

TENSORS = {"a": ("bfloat16", (300_000,)), "b": ("uint8", (7,)), "empty": ("float32", (0, 3))}


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder with one file, and the fingerprints of its tensors."""
    header, places = make_header((name, *kind) for name, kind in TENSORS.items())
    data = {name: os.urandom(end - begin) for name, (begin, end) in places.items()}
    (tmp_path / "bucket.safetensors").write_bytes(header + b"".join(data.values()))
    return tmp_path, {name: host_fingerprint(name, *TENSORS[name], data[name]) for name in TENSORS}


def flip(at: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return change


def cut(file: Path) -> None:
    os.truncate(file, 1000)


def rename_tensor(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"a"', b'"c"'))


def test_files_as_they_were_written_are_taken(written: tuple[Path, dict[str, str]]) -> None:
    assert why_damaged(*written) == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (flip(-1), "tensor 'b' in {file} is not what the trainer wrote"),
        (flip(-100_000), "tensor 'a' in {file} is not what the trainer wrote"),
        (rename_tensor, "tensor 'c' in {file} is not what the trainer wrote"),
        (flip(8), "{file} is not a safetensors file"),
        (cut, "{file} is not a safetensors file: tensor 'a' ends at byte 600000"),
    ],
)
def test_what_was_changed_is_named(
    written: tuple[Path, dict[str, str]], change: Callable[[Path], None], why: str
) -> None:
    folder, fingerprints = written
    file = folder / "bucket.safetensors"
    change(file)
    assert why.format(file=file) in why_damaged(folder, fingerprints)


def test_a_file_that_cannot_be_read_is_named(written: tuple[Path, dict[str, str]]) -> None:
    folder, fingerprints = written
    (folder / "another.safetensors").symlink_to("gone")
    assert "another.safetensors" in why_damaged(folder, fingerprints)


def test_what_cannot_be_compared_is_not_judged(written: tuple[Path, dict[str, str]]) -> None:
    folder, fingerprints = written
    flip(-1)(folder / "bucket.safetensors")
    assert why_damaged(folder, {}) == ""
    assert why_damaged(folder, {"a": "sums:0"}) == ""
    assert why_damaged(folder / "elsewhere", fingerprints) == ""
