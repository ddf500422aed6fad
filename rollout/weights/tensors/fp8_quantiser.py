"""Quantises a trainer's weights for a checkpoint in float8 with a scale per block.

Always true: what is quantised is decided by the checkpoint alone: the tensors that it holds as
``float8_e4m3fn`` with a ``weight_scale_inv``.  All others pass unchanged; stacked experts are split
before.  The result depends on name, dtype and shape in the same way on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engines.tensors.stacked_experts import split_experts
from rollout.core.errors import ConfigError, WeightMismatch
from rollout.weights.format.checkpoint_config import quantisation_of, read_checkpoint_config
from rollout.weights.format.manifest import FP8, SCALE_SUFFIX, Manifest, read_checkpoint_manifest
from rollout.weights.format.stacked_experts import is_stacked
from rollout.weights.tensors.push_plan import NameMap

MAX_FP8 = torch.finfo(torch.float8_e4m3fn).max
# The ``scale_fmt`` of DeepSeek V3.1: scales are powers of two, in float32.
_POWERS = "ue8m0"


@dataclass(frozen=True, eq=False)
class Fp8BlockQuantiser:
    """A name map that quantises weights; made by ``fp8_block_quantiser``.

    Attributes:
        names: the weights that the checkpoint holds quantised.
        block: rows and columns of a block.
        checkpoint: all its tensors.
        rounds_scales: its scales are powers of two.
    """

    names: frozenset[str]
    block: tuple[int, int]
    checkpoint: Manifest
    rounds_scales: bool = False

    def __call__(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensor itself, or its quantised values and their scales; those of each expert."""
        if is_stacked(name, self.checkpoint):
            for expert_name, expert in split_experts(name, tensor):
                yield from self(expert_name, expert)
            return
        if name not in self.names or tensor.dtype is torch.float8_e4m3fn:
            yield name, tensor
            return
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise WeightMismatch(
                f"tensor {name!r} is {tensor.dtype} of shape {list(tensor.shape)}, and only "
                "matrices of floats are quantised in blocks",
                tensor=name,
            )
        values, scales = quantised(tensor, self.block, rounds_scales=self.rounds_scales)
        yield name, values
        yield name + SCALE_SUFFIX, scales


def fp8_block_quantiser(model_path: str | Path) -> NameMap:
    """The name map that quantises a trainer's weights as this checkpoint's are.

    Make it once and pass it to every push, so that the plan of the push is kept.  The names are the
    checkpoint's; if the trainer's differ, call it inside your own name map:

        quantise = fp8_block_quantiser("/models/policy-fp8")

        def to_fp8(name, tensor):
            for mapped in to_hf(name, tensor):
                yield from quantise(*mapped)

    Args:
        model_path: the server's; a checkpoint with ``quantization_config`` in its ``config.json``.

    Raises:
        ConfigError: it is not quantised in float8 with a float32 scale per block.
    """
    quantisation = quantisation_of(read_checkpoint_config(model_path))
    block = _block_of(str(model_path), quantisation)
    manifest = read_checkpoint_manifest(model_path) or Manifest({})
    names = frozenset(
        name.removesuffix(SCALE_SUFFIX) for name in manifest.tensors if name.endswith(SCALE_SUFFIX)
    )
    if not names:
        raise _refusal(str(model_path), f"it holds no tensor ...{SCALE_SUFFIX}")
    for name in sorted(names):
        _check_tensors(str(model_path), name, manifest, block)
    rounds_scales = quantisation.get("scale_fmt") == _POWERS
    return Fp8BlockQuantiser(names, block, manifest, rounds_scales)


def quantised(
    weight: torch.Tensor, block: tuple[int, int], *, rounds_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight as float8, and the float32 scale of each block: ``weight = values * scale``.

    A scale is the largest absolute value of its block, divided by 448, the largest float8 number.
    Blocks at the right and lower edge may be smaller.

    Args:
        rounds_scales: up to the next power of two, as ``scale_fmt: ue8m0`` asks for.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(
        weight.to(torch.float32), (0, -columns % block[1], 0, -rows % block[0])
    )
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    # Without abs(): it would be another copy of the weight in float32.
    largest = torch.maximum(blocks.amax(dim=(1, 3)), -blocks.amin(dim=(1, 3)))
    scales = largest / MAX_FP8
    scales = torch.where(scales == 0, 1.0, scales)  # a block of zeros
    if rounds_scales:
        # To the exponent's bits of a float32, one more if there are others.
        scales = (scales.view(torch.int32) + 0x007FFFFF & 0x7F800000).view(torch.float32)
    # A value over the largest becomes NaN: the division may round up.
    values = (blocks / scales[:, None, :, None]).clamp_(-MAX_FP8, MAX_FP8)
    values = values.flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), scales


def _block_of(model_path: str, quantisation: Mapping[str, Any]) -> tuple[int, int]:
    if not quantisation:
        raise _refusal(model_path, "there is no quantization_config in its config.json")
    method, block = quantisation.get("quant_method"), quantisation.get("weight_block_size")
    if method != "fp8":
        raise _refusal(model_path, f"quant_method is {method!r}, not 'fp8'")
    if quantisation.get("fmt", "e4m3") != "e4m3":
        raise _refusal(model_path, f"fmt is {quantisation['fmt']!r}, not 'e4m3'")
    if (scale_fmt := quantisation.get("scale_fmt")) not in (None, _POWERS):
        raise _refusal(model_path, f"scale_fmt is {scale_fmt!r}, not {_POWERS!r}")
    if not isinstance(block, list) or len(block) != 2:
        raise _refusal(model_path, f"weight_block_size is {block!r}, not two numbers")
    return int(block[0]), int(block[1])


def _check_tensors(model_path: str, name: str, manifest: Manifest, block: tuple[int, int]) -> None:
    """Raise if the checkpoint does not hold this weight as the quantiser would make it."""
    weight, scale = manifest.tensors.get(name), manifest.tensors[name + SCALE_SUFFIX]
    if weight is None or weight.dtype != FP8 or len(weight.shape) != 2:
        held = "missing" if weight is None else f"{weight.dtype} of shape {list(weight.shape)}"
        raise _refusal(model_path, f"{name} is {held}, not a matrix of {FP8}")
    if scale.dtype != "float32":
        raise _refusal(model_path, f"{scale.name} is {scale.dtype}, not float32")
    blocks = tuple(-(-size // edge) for size, edge in zip(weight.shape, block, strict=True))
    if scale.shape != blocks:
        raise _refusal(
            model_path,
            f"{scale.name} has shape {list(scale.shape)}, and {list(weight.shape)} has "
            f"{list(blocks)} blocks of {list(block)}",
        )


def _refusal(model_path: str, why: str) -> ConfigError:
    return ConfigError(
        f"{model_path} cannot be pushed to by fp8_block_quantiser: {why}; it makes float8_e4m3fn "
        "with a float32 weight_scale_inv per block",
        setting="model_path",
        value=model_path,
    )
