"""Whether the files of a checkpoint are all there, and in full."""

from __future__ import annotations

import os
from pathlib import Path

from engines.plain_json import WRONG_FORM, read_json
from engines.tensors.safetensors_header import read_header

INDEX_FILE = "model.safetensors.index.json"
"""Says which file has which tensor; transformers' name for it."""


def why_not_whole(folder: Path) -> str:
    """Why a folder is no whole checkpoint.

    Files that an index names are all there, and no safetensors file ends before its tensors do.
    """
    try:
        for index in sorted(folder.glob("*.index.json")):
            files = set(read_json(index.read_bytes())["weight_map"].values())
            if missing := sorted(name for name in files if not (folder / name).is_file()):
                return f"{index} names {len(missing)} files that are not there, first {missing[0]}"
        for file in sorted(folder.glob("*.safetensors")):
            _check_length(file)
    except (OSError, *WRONG_FORM) as error:
        return f"{folder} is not a whole checkpoint: {type(error).__name__}: {error}"
    return ""


def _check_length(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_bytes, header = os.fstat(descriptor).st_size, read_header(file, descriptor)
        end = max((entry["data_offsets"][1] for entry in header.entries.values()), default=0)
        if num_bytes < header.num_bytes + end:
            raise ValueError(f"{file} has {num_bytes} bytes of {header.num_bytes + end}")
    finally:
        os.close(descriptor)
