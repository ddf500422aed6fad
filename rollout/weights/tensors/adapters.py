"""LoRA adapters: pushed, merged into the base; and whether the base differs from the checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engines.protocol.lora_config import module_and_half, rank_and_scale
from engines.tensors.torch_fingerprint import bytes_fingerprint
from rollout.core.errors import WeightMismatch
from rollout.weights.format.lora_check import check_adapter
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.format.plain_adapter import PlainAdapter, plain_adapter
from rollout.weights.tensors.push_plan import specs_of
from rollout.weights.tensors.sources import NamedTensors, Pairs, PlannedSource


class AdapterSource(PlannedSource):
    """A LoRA adapter as engines load it: one bucket, under PEFT's names.

    Args:
        named_tensors: under PEFT's names (``base_model.model....lora_A.weight``).
        config: PEFT's ``adapter_config.json``, or ``config.to_dict()``; at least ``r`` and
            ``lora_alpha``.
        base: the model's tensors, or None if the checkpoint has no manifest.
        kinds: of the engines.
        more: see ``PlannedSource``.

    Attributes:
        config: for the engines.

    Raises:
        WeightMismatch: the adapter does not match the model, or no engine can serve it.
    """

    def __init__(
        self,
        named_tensors: NamedTensors,
        config: Mapping[str, Any],
        *,
        base: Manifest | None = None,
        kinds: Collection[str] = (),
        **more: Any,
    ) -> None:
        super().__init__(named_tensors, **more)
        self._plain = plain_adapter(config, self.manifest, base, kinds)
        self.config = self._plain.config
        own = (self._padded(spec) for spec in self.manifest.tensors.values())
        self.manifest = Manifest.of((*own, *self._plain.zeros))

    def _padded(self, spec: TensorSpec) -> TensorSpec:
        added = self._plain.padding.get(spec.name, (0, 0))
        shape = tuple(size + more for size, more in zip(spec.shape, added, strict=True))
        return replace(spec, shape=shape)

    def buckets(self, bucket_bytes: int) -> Iterator[tuple[Pairs, bool]]:
        """The one bucket."""
        for pairs, is_last in super().buckets(sys.maxsize):
            yield Pairs.of(_made_plain(pairs, self._plain)), is_last


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
        base: tensors by checkpoint name.
        adapter, config: see ``AdapterSource``.

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

    weights = PlannedSource(named_tensors, expected=expected)
    files: dict[str, Any] = {}
    for file in sorted(Path(model_path).glob("*.safetensors")):
        handle: Any = safe_open(file, framework="pt")
        files |= dict.fromkeys(handle.keys(), handle)
    for pairs, _ in weights.buckets(1 << 28):
        for name, tensor in pairs:
            if name not in files:
                return True
            on_disk = files[name].get_tensor(name)
            if bytes_fingerprint(name, tensor) != bytes_fingerprint(name, on_disk):
                return True
        del pairs
    return False
