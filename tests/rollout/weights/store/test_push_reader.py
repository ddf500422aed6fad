"""Pushed buckets as plain bytes, read without torch."""

import ctypes
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from engines.protocol import STAYS
from rollout.core.errors import WeightsUnavailable
from rollout.weights.format.pushed_files import FileBytes
from rollout.weights.store.node.writer import MemoryBytes
from rollout.weights.store.push_reader import tensors_of

pytestmark = pytest.mark.embedded


def tensors() -> dict[str, Any]:
    import torch

    return {
        "a": torch.randn(3, 4).bfloat16(),
        "b": torch.arange(7),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.0),
        "part": torch.randn(10, 4)[2:5],
    }


def read(payload: Any) -> dict[str, bytes]:
    return {
        name: b"".join(map(bytes, one.pieces(7)))
        if isinstance(one, FileBytes | MemoryBytes)
        else bytes(one)
        for name, one in tensors_of(payload)
    }


def expected(wanted: dict[str, Any]) -> dict[str, bytes]:
    import torch

    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in wanted.items()
    }


def test_a_push_by_value_is_read(tmp_path: Path) -> None:
    from tests.support.still_server import make_push

    wanted = tensors()
    push = make_push(wanted, version=1, bucket_bytes=40)
    assert len(push.buckets) > 1
    found: dict[str, bytes] = {}
    for bucket in push.buckets:
        found |= read(bucket)
    assert found == expected(wanted)


def test_a_push_by_path_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    wanted = {name: tensor.contiguous() for name, tensor in tensors().items()}
    save_file(wanted, tmp_path / "bucket.safetensors")
    assert read({"path": str(tmp_path)}) == expected(wanted)


def test_a_file_that_stays_is_mapped_and_so_known_by_address(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    wanted = {name: tensor.contiguous() for name, tensor in tensors().items()}
    save_file(wanted, tmp_path / "bucket.safetensors", metadata={STAYS: "yes"})
    payload = {"path": str(tmp_path)}
    assert read(payload) == expected(wanted)
    found = dict(tensors_of(payload))
    # Also when the file has no name any more, and another bucket was requested.
    (tmp_path / "bucket.safetensors").unlink()
    for name, content in found.items():
        assert isinstance(content, MemoryBytes)
        assert ctypes.string_at(content.address, content.num_bytes) == expected(wanted)[name]


@pytest.mark.parametrize("offsets", [[0, 9], [-8, 0], [8, 4], [16, 20]])
def test_a_mapped_file_that_says_more_than_it_has_is_refused(
    offsets: list[int], tmp_path: Path
) -> None:
    entry = {"dtype": "U8", "shape": [1], "data_offsets": offsets}
    header = json.dumps({"__metadata__": {STAYS: "yes"}, "a": entry}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(8)
    (tmp_path / "bucket.safetensors").write_bytes(content)
    with pytest.raises(WeightsUnavailable, match="'a' ends at byte"):
        read({"path": str(tmp_path)})


def test_a_bucket_that_would_execute_something_does_not(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "touched",)

    with pytest.raises(WeightsUnavailable, match=r"names pathlib.*; only tensors"):
        read(pickle.dumps([("a", Evil())]))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "cannot be read"),
        (pickle.dumps(7), "cannot be read"),
        ({"names": ["a"]}, "has no tensors in it"),
    ],
)
def test_what_has_no_tensors_in_it_is_refused_in_words(payload: Any, said: str) -> None:
    with pytest.raises(WeightsUnavailable, match=said):
        read(payload)


def test_a_pushed_folder_that_is_gone_or_cut_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bucket.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(WeightsUnavailable, match="is gone"):
        read({"path": str(tmp_path)})
