"""A random Qwen3, made from a config: 1.5 GB on a GPU, a tiny one on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.gpu.machine import Gpu

SIZE_VARIABLE = "GPU_MODEL_GB"
_LAYER_BYTES = 37_756_928 * 2  # of the 2048 wide model, in bfloat16
NUM_TOKENS = {"cpu": 16384, "cuda": 65536}
"""Tokens of an engine's KV cache: 5 GiB of the large model."""


def make_model(folder: Path, gpu: Gpu, seed: int = 0) -> Path:
    """The directory of a checkpoint with tied embeddings."""
    from rollout.testing.tiny_model import make_tiny_model

    options: dict[str, Any] = {"hidden_size": 256, "num_layers": 2}
    if gpu.is_real:
        num_bytes = float(os.environ.get(SIZE_VARIABLE, "1.5")) * 1e9
        num_layers = max(1, round(num_bytes / _LAYER_BYTES))
        options = {"hidden_size": 2048, "num_layers": num_layers, "num_heads": 16}
        options["num_kv_heads"] = 8
    return make_tiny_model(folder, "qwen3", seed, tie_embeddings=True, dtype="bfloat16", **options)


def load_tensors(model: Path, gpu: Gpu) -> dict[str, Any]:
    """Its tensors on the GPU, under the checkpoint's names."""
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(model / "model.safetensors", device=gpu.device)
    return found
