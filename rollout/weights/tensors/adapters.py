"""LoRA adapters: pushed, merged into the base; and whether the base differs from the checkpoint.

Always true: a push's manifest names an adapter's tensors ``lora:<adapter>:<tensor>``, as engines
do, so that they are never confused with the base's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from engines.embedded.weights.torch_fingerprint import bytes_fingerprint
from rollout.config import WeightUpdate
from rollout.weights.format.lora_check import prefixed
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.tensors.payload import adapter_payload
from rollout.weights.tensors.push_plan import specs_of
from rollout.weights.tensors.tensor_sources import NamedTensors, TrainerWeights
from rollout.weights.transports.carriers import AsAdapter


def make_adapter_push(
    named_tensors: NamedTensors, config: Mapping[str, Any], *, name: str, version: int
) -> WeightPush:
    """A push of a copy of one adapter.

    Args:
        named_tensors: under PEFT's names (``base_model.model....lora_A.weight``).
        config: PEFT's ``adapter_config.json``; at least ``r`` and ``lora_alpha``.
    """
    weights = TrainerWeights(named_tensors, bucket_bytes=1 << 62)
    pairs = [pair for bucket, _ in weights.gathered() for pair in bucket]
    manifest = Manifest(
        {
            prefixed(name, spec.name): TensorSpec(prefixed(name, spec.name), spec.dtype, spec.shape)
            for spec in specs_of(pairs)
        },
        {prefixed(name, tensor): bytes_fingerprint(tensor, value) for tensor, value in pairs},
    )
    return WeightPush(
        version,
        manifest,
        [adapter_payload(pairs)],
        AsAdapter(name, dict(config)),
        contents=WeightUpdate.LORA,
    )


def own_manifest(push: WeightPush, name: str) -> Manifest:
    """An adapter push's tensors under PEFT's names."""
    start = len(prefixed(name, ""))
    return Manifest.of(
        TensorSpec(spec.name[start:], spec.dtype, spec.shape)
        for spec in push.manifest.tensors.values()
    )


def merged(
    base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The base with the adapter added to it, one tensor at a time; neither is changed.

    Push this as full weights where an engine does not serve adapters, or their cost matters.
    """
    rank = int(config["r"])
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in adapter.items():
        module, _, half = name.removeprefix("base_model.model.").partition(".lora_")
        halves.setdefault(f"{module}.weight", {})[half[0]] = tensor
    for name, tensor in base.items():
        pair = halves.get(name)
        if pair is None:
            yield name, tensor
        else:
            # In float32: bfloat16 would round small changes away before the sum.
            delta = pair["B"].detach().float() @ pair["A"].detach().float()
            yield name, (tensor.detach().float() + scale * delta).to(tensor.dtype)


def differs_from_checkpoint(
    named_tensors: NamedTensors, model_path: str | Path, expected: Manifest | None
) -> bool:
    """Whether a trainer's base differs from what engines load from ``model_path``.

    It compares fingerprints, one tensor at a time, to save memory.  A tensor of another dtype is
    different.
    """
    from safetensors import safe_open

    weights = TrainerWeights(named_tensors, bucket_bytes=1 << 28, expected=expected)
    files: dict[str, Any] = {}
    for file in sorted(Path(model_path).glob("*.safetensors")):
        handle: Any = safe_open(file, framework="pt")
        files |= dict.fromkeys(handle.keys(), handle)
    for pairs, _ in weights.gathered():
        for name, tensor in pairs:
            if name not in files:
                return True
            on_disk = files[name].get_tensor(name)
            if bytes_fingerprint(name, tensor) != bytes_fingerprint(name, on_disk):
                return True
        del pairs
    return False
