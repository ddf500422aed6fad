"""A LoRA adapter in PEFT's words, checked against the model it shall change.

Always true: an adapter that SGLang would take wrongly, in part or not at all is refused here,
before anything is sent.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from rollout.errors import WeightMismatch
from rollout.verification import ADAPTER_PREFIX
from rollout.weights.manifest import Manifest

_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>A|B)(\.\w+)?\.weight$")


def prefixed(adapter: str, tensor: str) -> str:
    """An adapter's tensor among all weights of an engine, as fingerprints name it."""
    return f"{ADAPTER_PREFIX}{adapter}:{tensor}"


def check_adapter(config: Mapping[str, Any], tensors: Manifest, base: Manifest | None) -> None:
    """Refuse an adapter that does not fit.

    Args:
        tensors: its own, under PEFT's names.
        base: the model's; None where the checkpoint does not say.

    Raises:
        WeightMismatch: a name that is no half of a linear layer's LoRA, half of a pair, a layer
            the model lacks, a shape that is not the layer's and the rank's, or a bad config.
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
