"""Which files of a folder are a checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines.embedded.core.errors import Invalid
from engines.embedded.weights.disk_update import checkpoint_files

pytestmark = pytest.mark.embedded
INDEX = "model.safetensors.index.json"


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    for name in ("a", "b", "consolidated"):
        (tmp_path / f"{name}.safetensors").touch()
    named = {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": named}))
    assert [file.name for file in checkpoint_files(str(tmp_path))] == [
        "a.safetensors",
        "b.safetensors",
    ]


@pytest.mark.parametrize("name", ["../a.safetensors", "/a.safetensors", "in/a.safetensors", 5])
def test_an_index_names_nothing_outside_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(Invalid, match=r"index\.json"):
        checkpoint_files(str(tmp_path))
