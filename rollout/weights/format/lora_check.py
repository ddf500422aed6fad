"""Checks a LoRA adapter in PEFT's format against the model it belongs to.

Always true: an adapter that an engine would load wrongly, in part or not at all is refused before
anything is sent.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from engines.protocol.lora_config import (
    module_and_half,
    rank_and_scale,
    why_incomplete,
    why_unsupported,
)
from rollout.core.errors import WeightMismatch
from rollout.rules.fingerprint_check import adapter_prefix
from rollout.weights.format.manifest import Manifest

logger = logging.getLogger(__name__)


@lru_cache(8)
def warn_of_base(named: str, model_path: str) -> None:
    """Say once if an adapter names another base than the engines' model, by the folder's name."""
    if named and Path(named).name not in re.split("/|--", model_path):
        logger.warning(
            "the adapter's base_model_name_or_path is %s, and the engines' model is %s: with other "
            "weights every reply is wrong; checks.base_differs compares a trainer's base with it",
            named,
            model_path,
        )


def prefixed(adapter: str, tensor: str) -> str:
    """The name of an adapter's tensor in fingerprints and manifests."""
    return adapter_prefix(adapter) + tensor


def prefixed_manifest(adapter: str, tensors: Manifest) -> Manifest:
    """An adapter's tensors as a push names them, never confused with the base's."""
    return Manifest.of(
        (replace(spec, name=prefixed(adapter, name)) for name, spec in tensors.tensors.items()),
        {prefixed(adapter, name): value for name, value in tensors.fingerprints.items()},
    )


def check_adapter(config: Mapping[str, Any], tensors: Manifest, base: Manifest | None) -> None:
    """Raise if no engine can serve the adapter, or if it does not match the model.

    Args:
        config: PEFT's ``adapter_config.json``, or its ``config.to_dict()``.
        tensors: the adapter's tensors, under PEFT's names.
        base: the model's tensors, or None if the checkpoint has no manifest.

    Raises:
        WeightMismatch: a name is not ``...lora_A.weight`` or ``...lora_B.weight``, a pair is
            incomplete, the model has no such layer, a shape does not match layer and rank, or the
            config is incomplete or has a field that no engine honours.
    """
    if why := why_incomplete(config):
        raise WeightMismatch(f"an adapter's config {why}")
    if why := why_unsupported(config):
        raise WeightMismatch(f"an adapter's {why}")
    halves: dict[str, set[str]] = {}
    for name, spec in tensors.tensors.items():
        found = module_and_half(name)
        if found is None:
            raise WeightMismatch(
                f"adapter tensor {name!r} is no ...lora_A.weight or ...lora_B.weight", tensor=name
            )
        module, half = found
        if half in halves.setdefault(module, set()):
            raise WeightMismatch(f"the adapter has lora_{half} of {module!r} twice", tensor=name)
        halves[module].add(half)
        rank, _ = rank_and_scale(config, module)
        if len(spec.shape) != 2 or spec.shape[0 if half == "A" else -1] != rank:
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
