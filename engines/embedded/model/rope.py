"""Rotary position embeddings and how they are scaled, as transformers computes them.

Names are those of ``config.json``.  What depends on the length of a sequence (``dynamic``,
``longrope``) is refused by ``core.model_config``: a cached key would change with it.
"""

from __future__ import annotations

import math

import torch

from engines.embedded.core.model_config import Rope


def frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angles of one position, float32 ``[head_dim / 2]``, and the scale of cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    periods: torch.Tensor = rope.rope_theta**exponents
    plain = 1.0 / periods
    factor = rope.factor or 1.0
    if rope.rope_type == "linear":
        return plain / factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain, factor), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, periods, factor), _yarn_attention(rope, factor)
    return plain, 1.0


def _llama3(rope: Rope, plain: torch.Tensor, factor: float) -> torch.Tensor:
    """Long waves are stretched, short ones are not, and those between are in part."""
    length, low, high = (
        rope.original_max_position_embeddings,
        rope.low_freq_factor,
        rope.high_freq_factor,
    )
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > length / low, plain / factor, plain)
    share = (length / wavelength - low) / (high - low)
    between = (1 - share) * stretched / factor + share * stretched
    is_between = (wavelength >= length / high) & (wavelength <= length / low)
    return torch.where(is_between, between, stretched)


def _yarn(rope: Rope, periods: torch.Tensor, factor: float) -> torch.Tensor:
    """Dimensions that turn often keep their angles, those that turn seldom are stretched."""
    head_dim = 2 * len(periods)

    def dimension(num_turns: float) -> float:
        """The dimension that turns so often within the original length."""
        length = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.rope_theta))

    first, last = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - first
    kept = 1 - (ramp / (last - first if last != first else 0.001)).clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_attention(rope: Rope, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
