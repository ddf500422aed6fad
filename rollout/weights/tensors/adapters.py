"""LoRA adapters: pushed, merged into the base; and whether the base differs from the checkpoint.

Always true: a push's manifest names an adapter's tensors ``lora:<adapter>:<tensor>``, as engines
do, so that they are never confused with the base's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from engines.embedded.weights.torch_fingerprint import bytes_fingerprint
from engines.protocol.lora_config import module_and_half, rank_and_scale
from rollout.config import EngineKind, WeightUpdate
from rollout.core.errors import WeightMismatch
from rollout.weights.format.lora_check import check_adapter, prefixed
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.format.plain_adapter import PlainAdapter, plain_adapter
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.tensors.payload import Pairs, adapter_payload
from rollout.weights.tensors.push_plan import specs_of
from rollout.weights.tensors.tensor_sources import NamedTensors, TrainerWeights
from rollout.weights.transports.carriers import AsAdapter


def make_adapter_push(
    named_tensors: NamedTensors,
    config: Mapping[str, Any],
    *,
    name: str,
    version: int,
    base: Manifest | None = None,
    kinds: Collection[EngineKind] = (),
) -> WeightPush:
    """A push of a copy of one adapter.

    Args:
        named_tensors: under PEFT's names (``base_model.model....lora_A.weight``).
        config: PEFT's ``adapter_config.json``, or ``config.to_dict()``; at least ``r`` and
            ``lora_alpha``.
        base: the model's tensors; None if the checkpoint has no manifest.
        kinds: of the engines.

    Raises:
        WeightMismatch: the adapter does not match the model, or no engine can serve it.
    """
    weights = TrainerWeights(named_tensors, bucket_bytes=1 << 62)
    own = [pair for bucket, _ in weights.gathered() for pair in bucket]
    plain = plain_adapter(config, Manifest.of(specs_of(own)), base, kinds)
    pairs = list(_made_plain(own, plain))
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
        AsAdapter(name, plain.config),
        contents=WeightUpdate.LORA,
    )


def _made_plain(pairs: Pairs, plain: PlainAdapter) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in pairs:
        rows, columns = plain.padding.get(name, (0, 0))
        factor = plain.factors.get(name)
        scaled = tensor.detach() if factor is None else _times(name, tensor.detach(), factor)
        yield name, torch.nn.functional.pad(scaled, (0, columns, 0, rows))
    for spec in plain.zeros:
        yield spec.name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))


def _times(name: str, tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The product with a power of two, which is exact unless a value leaves the dtype's range."""
    product = tensor * factor
    if not torch.equal(product / factor, tensor):
        raise WeightMismatch(
            f"adapter tensor {name!r} times {factor:g} is not exact in {tensor.dtype}; engines "
            "have one scale for all modules, so push it in float32, or choose other alphas",
            tensor=name,
        )
    return product


def merged(
    base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The base with the adapter added to it, one tensor at a time; neither is changed.

    Push this as full weights where an engine does not serve adapters, or their cost matters.

    Args:
        adapter, config: see ``make_adapter_push``.

    Raises:
        WeightMismatch: the adapter does not match the base, or is more than an addition to it.
    """
    check_adapter(
        config, Manifest.of(specs_of(adapter.items())), Manifest.of(specs_of(base.items()))
    )
    return _merged(base, adapter, config)


def _merged(
    base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in adapter.items():
        if (found := module_and_half(name)) is not None:
            halves.setdefault(f"{found[0]}.weight", {})[found[1]] = tensor
    for name, tensor in base.items():
        pair = halves.get(name)
        if pair is None:
            yield name, tensor
        else:
            # In float32: bfloat16 would round small changes away before the sum.
            delta = pair["B"].detach().float() @ pair["A"].detach().float()
            _, scale = rank_and_scale(config, name.removesuffix(".weight"))
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
