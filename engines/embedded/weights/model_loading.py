"""A model from its folder: its parameters are read straight into the memory they stay in."""

from __future__ import annotations

import torch

from engines.embedded.core.errors import Invalid
from engines.embedded.core.model_config import ModelConfig
from engines.embedded.memory.regions import Memory
from engines.embedded.model.decoder import Decoder
from engines.embedded.weights.disk_update import checkpoint_files, update_from_disk
from engines.embedded.weights.model_weights import ModelWeights, place
from engines.tensors.safetensors_header import read_header

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


def load_model(config: ModelConfig, path: str, dtype: str, memory: Memory) -> Decoder:
    """The model of this folder.

    Args:
        dtype: ``auto`` is that of ``config.json``, or else of the checkpoint.

    Raises:
        ValueError: its files do not fit its ``config.json``.
        MemoryError: there is no memory for it.
    """
    try:
        named = dtype if dtype != "auto" else config.dtype or _stored_dtype(path)
        if named not in _DTYPES:
            raise ValueError(f"weights of {named} are not supported; SGLang and vLLM have them")
        model = Decoder(config, _DTYPES[named])
        place(model, memory)
        update_from_disk(ModelWeights(model), path, is_whole=True)
    except Invalid as error:
        raise ValueError(str(error)) from None
    return model


def _stored_dtype(path: str) -> str:
    """The type of the checkpoint's first tensor."""
    with checkpoint_files(path)[0].open("rb") as file:
        return read_header(file.name, file.fileno()).specs()[0][1]
