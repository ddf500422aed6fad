"""Files that stay mapped between pushes: which are kept, read again and unmapped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines.embedded.core.errors import Invalid
from engines.embedded.memory.mapped_files import MappedFiles
from engines.embedded.weights.disk_update import update_from_disk
from engines.embedded.weights.model_weights import ModelWeights
from engines.protocol import STAYS
from safetensors.torch import save_file
from tests.support.processes import wait_until

pytestmark = pytest.mark.embedded


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(300, 7), requires_grad=False)
        self.b = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16), requires_grad=False)


def write(path: Path, value: float, *, stays: bool = True, **more: torch.Tensor) -> None:
    """Into the file that is there, as a trainer writes its slots."""
    tensors = {"a": torch.full((300, 7), value), "b": torch.ones(5, dtype=torch.bfloat16)}
    beside = path.with_suffix(".beside")
    save_file({**tensors, **more}, beside, metadata={STAYS: "yes"} if stays else {})
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(beside.read_bytes())
    beside.unlink()


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bucket.safetensors"


@pytest.fixture
def mapped() -> MappedFiles:
    return MappedFiles(look_every_s=0.01)


def test_what_is_written_again_is_loaded_again_from_the_same_mapping(
    path: Path, mapped: MappedFiles
) -> None:
    model = Model()
    weights = ModelWeights(model)
    for value in (1.0, 2.0, 3.0):
        write(path, value)
        update_from_disk(weights, str(path.parent), mapped)
        assert torch.equal(model.a, torch.full((300, 7), value))
        assert model.b.tolist() == [1.0] * 5
    assert mapped.num_kept() == 1
    assert is_mapped(path)


def test_a_file_that_promises_nothing_is_not_kept(path: Path, mapped: MappedFiles) -> None:
    model = Model()
    write(path, 4.0, stays=False)
    update_from_disk(ModelWeights(model), str(path), mapped)
    assert model.a[0, 0] == 4.0
    assert mapped.num_kept() == 0
    assert not is_mapped(path)


def test_the_memory_of_a_file_that_was_removed_is_soon_free(
    path: Path, mapped: MappedFiles
) -> None:
    write(path, 1.0)
    update_from_disk(ModelWeights(Model()), str(path), mapped)
    path.unlink()
    assert wait_until(lambda: not is_mapped(path), 60)
    assert mapped.num_kept() == 0


def test_another_file_of_the_same_name_is_what_is_loaded(path: Path, mapped: MappedFiles) -> None:
    model = Model()
    weights = ModelWeights(model)
    write(path, 1.0)
    update_from_disk(weights, str(path), mapped)
    path.rename(path.with_name("still.here"))  # or the new one might get its inode
    write(path, 2.0)
    update_from_disk(weights, str(path), mapped)
    assert model.a[0, 0] == 2.0


@pytest.mark.parametrize(
    "wrong", [{"a": torch.zeros(7, 300)}, {"b": torch.zeros(5, dtype=torch.int16)}]
)
def test_a_kept_file_that_holds_something_else_now_is_checked_again(
    path: Path, mapped: MappedFiles, wrong: dict[str, torch.Tensor]
) -> None:
    model = Model()
    weights = ModelWeights(model)
    write(path, 1.0)
    update_from_disk(weights, str(path), mapped)
    write(path, 2.0, **wrong)
    with pytest.raises(Invalid, match="nothing was updated"):
        update_from_disk(weights, str(path), mapped)
    assert model.a[0, 0] == 1.0
    write(path, 3.0)
    update_from_disk(weights, str(path), mapped)
    assert model.a[0, 0] == 3.0


def test_one_wrong_file_leaves_all_as_they_were(path: Path, mapped: MappedFiles) -> None:
    model = Model()
    weights = ModelWeights(model)
    write(path, 1.0)
    update_from_disk(weights, str(path.parent), mapped)
    write(path, 2.0)
    save_file({"unknown": torch.zeros(1)}, path.with_name("other.safetensors"))
    with pytest.raises(Invalid, match="unknown"):
        update_from_disk(weights, str(path.parent), mapped)
    assert model.a[0, 0] == 1.0


def test_a_file_of_another_dtype_is_converted_every_time(path: Path, mapped: MappedFiles) -> None:
    model = Model()
    weights = ModelWeights(model)
    for value in (1.0, 2.0):
        write(path, value, b=torch.full((5,), value))
        update_from_disk(weights, str(path), mapped)
        assert model.b.tolist() == [value] * 5
