"""Tensors that are hashed where they were read to: what is damaged fails the load, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from engines.embedded.core.errors import Invalid
from engines.embedded.weights.disk_update import update_from_disk
from engines.embedded.weights.model_weights import ModelWeights
from engines.protocol import FINGERPRINTS, STAYS
from engines.tensors.torch_fingerprint import bytes_fingerprint
from safetensors.torch import save_file

pytestmark = pytest.mark.embedded

Write = Callable[..., Path]

# More than is copied at once, and not a multiple of it.
LARGE = (600, 1001)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, made in (
            ("large", torch.zeros(LARGE)),
            ("small", torch.zeros(3, dtype=torch.bfloat16)),
            ("empty", torch.zeros(0)),
            ("turned", torch.zeros(4, 2).t()),
        ):
            setattr(self, name, torch.nn.Parameter(made, requires_grad=False))


def pushed() -> dict[str, torch.Tensor]:
    return {
        "large": torch.randn(LARGE),
        # The model has it in another dtype: converted after it was verified.
        "small": torch.randn(3),
        "empty": torch.zeros(0),
        "turned": torch.randn(2, 4),
    }


@pytest.fixture(params=["mapped", "read"], autouse=True)
def metadata(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of files that may be mapped, because they keep their length, and of others."""
    return {STAYS: "yes"} if request.param == "mapped" else {}


@pytest.fixture
def write(metadata: dict[str, str]) -> Write:
    return partial(_write, metadata)


def _write(
    metadata: dict[str, str], folder: Path, tensors: dict[str, torch.Tensor], **proofs: str | None
) -> Path:
    """Two files and their fingerprints, some of them changed or left out."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    for file, its in (("1.safetensors", names[:2]), ("2.safetensors", names[2:])):
        save_file({name: tensors[name] for name in its}, folder / file, metadata=metadata)
    found = {name: bytes_fingerprint(name, one) for name, one in tensors.items()} | proofs
    told = {name: proof for name, proof in found.items() if proof is not None}
    (folder / FINGERPRINTS).write_text(json.dumps(told))
    return folder


def test_what_is_right_is_loaded(tmp_path: Path, write: Write) -> None:
    model, tensors = Model(), pushed()
    update_from_disk(ModelWeights(model), str(write(tmp_path / "v1", tensors)))
    assert torch.equal(model.large, tensors["large"])
    assert torch.equal(model.small, tensors["small"].to(torch.bfloat16))
    assert torch.equal(model.turned, tensors["turned"])


@pytest.mark.parametrize("name", ["large", "small", "turned"])
@pytest.mark.parametrize("at", [0.0, 0.5, 0.9999])
def test_a_flipped_bit_anywhere_fails_the_load_by_name(
    name: str, at: float, tmp_path: Path, write: Write
) -> None:
    tensors = pushed()
    damaged = {key: one.clone() for key, one in tensors.items()}
    content = damaged[name].view(-1).view(torch.uint8)
    content[int(at * len(content))] ^= 4
    folder = write(tmp_path / "v1", damaged, **{name: bytes_fingerprint(name, tensors[name])})
    with pytest.raises(Invalid, match=f"'{name}' is damaged.* the weights are now a mixture"):
        update_from_disk(ModelWeights(Model()), str(folder))


@pytest.mark.parametrize(
    ("proofs", "told"),
    [
        ({"large": None}, "'large' has no fingerprint"),
        ({"other": "xxh3:00"}, "there is no 'other'"),
    ],
)
def test_names_that_do_not_agree_fail_it_before_anything_is_changed(
    proofs: dict[str, str | None], told: str, tmp_path: Path, write: Write
) -> None:
    model = Model()
    folder = write(tmp_path / "v1", pushed(), **proofs)
    with pytest.raises(Invalid, match=f"{told}; nothing was updated"):
        update_from_disk(ModelWeights(model), str(folder))
    assert not model.large.any()


@pytest.mark.parametrize("text", ["[1]", '{"large": 1}', "{", ""])
def test_a_file_that_is_no_fingerprints_is_no_checkpoint_without_them(
    text: str, tmp_path: Path, write: Write
) -> None:
    folder = write(tmp_path / "v1", pushed())
    (folder / FINGERPRINTS).write_text(text)
    with pytest.raises(Invalid, match="nothing was updated"):
        update_from_disk(ModelWeights(Model()), str(folder))


def test_a_file_that_ends_early_is_no_success(tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path / "v1", pushed())
    path = folder / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Invalid, match="cannot read"):
        update_from_disk(ModelWeights(Model()), str(folder))


def test_no_file_stays_mapped(tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path / "v1", pushed())
    update_from_disk(ModelWeights(Model()), str(folder))
    assert str(folder) not in Path("/proc/self/maps").read_text()
