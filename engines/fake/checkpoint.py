"""A checkpoint directory for fake engines: the headers of real weights, and no weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from engines.fake.weights import DEFAULT_TENSORS
from engines.protocol import TensorInfo

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_checkpoint(folder: Path | str, tensors: Sequence[TensorInfo] = DEFAULT_TENSORS) -> Path:
    """Write what a server reads of a model before it starts engines; returns ``folder``.

    The safetensors file has the names, types and shapes of ``tensors`` and no data, so a push is
    checked against it as against a real one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "fake"}')
    header = json.dumps(
        {
            one.name: {
                "dtype": _DTYPES[one.dtype],
                "shape": list(one.shape),
                "data_offsets": [0, 0],
            }
            for one in tensors
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder
