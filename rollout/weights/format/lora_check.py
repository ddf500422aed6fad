"""Checks a LoRA adapter in PEFT's format against the model it belongs to.

Always true: an adapter that SGLang would load wrongly, in part or not at all is refused before
anything is sent.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from rollout.core.errors import WeightMismatch
from rollout.rules.fingerprint_check import ADAPTER_PREFIX
from rollout.weights.format.manifest import Manifest

_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>A|B)(\.\w+)?\.weight$")


def prefixed(adapter: str, tensor: str) -> str:
    """The name of an adapter's tensor in fingerprints and manifests."""
    return f"{ADAPTER_PREFIX}{adapter}:{tensor}"


def check_adapter(config: Mapping[str, Any], tensors: Manifest, base: Manifest | None) -> None:
    """Raise if the adapter does not match the model.

    Args:
        tensors: the adapter's tensors, under PEFT's names.
        base: the model's tensors; None if the checkpoint has no manifest.

    Raises:
        WeightMismatch: a name is not ``...lora_A.weight`` or ``...lora_B.weight``, a pair is
            incomplete, the model has no such layer, a shape does not match layer and rank, or the
            config is bad.
    """
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1 or "lora_alpha" not in config:
        raise WeightMismatch(
            f"an adapter's config needs r, a whole number, and lora_alpha; it has {dict(config)!r}"
        )
    halves: dict[str, set[str]] = {}
    for name, spec in tensors.tensors.items():
        found = _NAME.match(name)
        if found is None:
            raise WeightMismatch(
                f"adapter tensor {name!r} is no ...lora_A.weight or ...lora_B.weight", tensor=name
            )
        module, half = found["module"], found["half"]
        halves.setdefault(module, set()).add(half)
        if spec.shape[0 if half == "A" else -1] != rank:
            raise WeightMismatch(
                f"adapter tensor {name!r} has shape {list(spec.shape)}, which has not rank {rank}",
                tensor=name,
            )
        if base is not None:
            _check_against(name, module, half, spec.shape, base)
    if not halves:
        raise WeightMismatch("the adapter holds no tensors")
    for module, known in halves.items():
        if len(known) < 2:
            raise WeightMismatch(f"the adapter has only lora_{known.pop()} of {module!r}")


def completed_config(config: Mapping[str, Any], tensors: Manifest) -> dict[str, Any]:
    """The config with what engines also need, as far as it follows from the tensors.

    Args:
        tensors: the adapter's tensors, under PEFT's names.
    """
    modules = {found["module"] for name in tensors.tensors if (found := _NAME.match(name))}
    targets = sorted({module.rpartition(".")[2] for module in modules})
    return {"peft_type": "LORA", "target_modules": targets, **config}


def _check_against(
    name: str, module: str, half: str, shape: tuple[int, ...], base: Manifest
) -> None:
    layer = base.tensors.get(f"{module}.weight")
    if layer is None:
        near = difflib.get_close_matches(f"{module}.weight", base.tensors, n=1)
        hint = f"; did you mean {near[0].removesuffix('.weight')!r}?" if near else ""
        raise WeightMismatch(f"the model has no layer {module!r}{hint}", tensor=name)
    wanted = layer.shape[-1] if half == "A" else layer.shape[0]
    got = shape[-1] if half == "A" else shape[0]
    if wanted != got:
        raise WeightMismatch(
            f"adapter tensor {name!r} has shape {list(shape)}, but {module!r} is "
            f"{list(layer.shape)}",
            tensor=name,
        )
