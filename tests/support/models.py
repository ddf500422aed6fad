"""Tiny checkpoints whose answers a router can take up anywhere."""

from __future__ import annotations

from pathlib import Path

NUM_PLAIN = 94
"""The first ids of the tiny tokenizer: printable ASCII."""


FOR_VLLM = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1}
"""A shape with heads of 32 elements, the smallest that vLLM's CPU kernels know."""


def make_plain_model(path: Path, seed: int, **shape: int) -> Path:
    """A tiny model whose greedy tokens are plain ASCII: a request goes on where its text is whole,
    which random bytes seldom are.

    Args:
        shape: see ``make_tiny_model``.
    """
    from safetensors.torch import load_file, save_file

    from rollout.testing.tiny_model import make_tiny_model

    make_tiny_model(path, seed=seed, **{"hidden_size": 32, "num_layers": 1} | shape)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][NUM_PLAIN:] = 0.0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def plain_models(folder: Path, num: int = 4, **shape: int) -> list[Path]:
    """Several of one shape, with weights of their own."""
    return [make_plain_model(folder / f"weights-{seed}", seed, **shape) for seed in range(num)]
