"""A LoRA adapter in the form that every engine loads: one rank, one alpha, whole stacks.

Always true: a plain adapter has the scale of PEFT for each module, and no value of a tensor is
rounded; what has no such form is refused.  Engines get no other field of PEFT's configuration.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engines.kinds import kind_of
from engines.protocol.lora_config import module_and_half, rank_and_scale
from rollout.core.errors import WeightMismatch
from rollout.weights.format.lora_check import check_adapter
from rollout.weights.format.manifest import Manifest, TensorSpec


@dataclass(frozen=True, slots=True)
class PlainAdapter:
    """How to make a plain adapter from the trainer's.

    Attributes:
        config: the configuration for engines; the values of JSON alone.
        factors: what to multiply a tensor by, where that is not 1: powers of two.
        padding: rows and columns of zeros to add to a tensor of a smaller rank.
        zeros: tensors to add.
    """

    config: Mapping[str, Any]
    factors: Mapping[str, float]
    padding: Mapping[str, tuple[int, int]]
    zeros: tuple[TensorSpec, ...]


def plain_adapter(
    config: Mapping[str, Any],
    tensors: Manifest,
    base: Manifest | None,
    kinds: Collection[str] = (),
) -> PlainAdapter:
    """The plain form of an adapter.

    Args:
        config: PEFT's ``adapter_config.json``, or its ``config.to_dict()``.
        tensors: the adapter's tensors, under PEFT's names.
        base: the model's tensors, or None if the checkpoint has no manifest.
        kinds: of the engines that will load it.

    Raises:
        WeightMismatch: the adapter does not match the model, or has no plain form.
    """
    check_adapter(config, tensors, base)
    halves = {name: found for name in tensors.tensors if (found := module_and_half(name))}
    known = {module: rank_and_scale(config, module) for module, _ in halves.values()}
    rank = max(rank for rank, _ in known.values())
    # The smallest: values of float16 may get too small for it, seldom too large.
    scale = min((own for _, own in known.values() if own), key=abs, default=0.0)
    factors = {
        name: factor
        for name, (module, half) in halves.items()
        if half == "B" and (factor := _factor(module, known[module][1], scale)) != 1.0
    }
    padding = {
        name: (rank - own, 0) if half == "A" else (0, rank - own)
        for name, (module, half) in halves.items()
        if (own := known[module][0]) != rank
    }
    zeros = {
        zero.name: zero
        for name, (module, half) in halves.items()
        for other in _needed_beside(module, kinds)
        if other not in known
        if (zero := _zeros(tensors.tensors[name], half, rank, module, other, base)) is not None
    }
    alpha = config["lora_alpha"]
    modules = {found[0] for name in (*halves, *zeros) if (found := module_and_half(name))}
    plain = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha if alpha / rank == scale else scale * rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }
    return PlainAdapter(plain, factors, padding, tuple(zeros.values()))


def _factor(module: str, own: float, scale: float) -> float:
    """The power of two that one module's scale is, in units of the scale for all."""
    if own == scale:
        return 1.0
    factor = math.copysign(2.0 ** round(math.log2(abs(own / scale))), own / scale) if own else 0.0
    # Both scales are rounded quotients: PEFT's EVA gives all modules one scale, by other numbers.
    if not math.isclose(factor * scale, own, rel_tol=1e-12) or not factor:
        raise WeightMismatch(
            f"use_rslora, rank_pattern and alpha_pattern give {module!r} the scale {own:g}, other "
            f"modules {scale:g}. Engines have one scale for all, so scales can differ by powers of "
            "two only; choose such alphas, or push base and adapter merged, with is_base=True"
        )
    return factor


def _needed_beside(module: str, kinds: Collection[str]) -> Iterator[str]:
    """The modules that engines of these kinds need of an adapter with this one."""
    parent, dot, leaf = module.rpartition(".")
    for kind in kinds:
        for stack, needed in kind_of(kind).adapter_stacks.items():
            if leaf in stack:
                yield from (f"{parent}{dot}{other}" for other in needed)


def _zeros(
    spec: TensorSpec, half: str, rank: int, module: str, other: str, base: Manifest | None
) -> TensorSpec | None:
    """Zeros for another module, like a tensor of this one, or None if the model has no such
    module."""
    if base is None:
        raise WeightMismatch(
            f"SGLang cannot load an adapter of {module!r} without {other!r}, whose shape is not "
            "known here; add a lora_A and a lora_B of zeros for it",
            tensor=spec.name,
        )
    layer = base.tensors.get(f"{other}.weight")
    if layer is None:
        return None
    before, _, after = spec.name.rpartition(module)
    shape = (rank, layer.shape[-1]) if half == "A" else (layer.shape[0], rank)
    return TensorSpec(f"{before}{other}{after}", spec.dtype, shape)
