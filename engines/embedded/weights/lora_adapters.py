"""LoRA adapters beside the model: loaded, checked, and added to the rows of their requests.

Always true: an adapter is checked whole, every module, shape and rank, before anything changes;
a request keeps the adapter it began with to its end, also when that is unloaded meanwhile; what
is cached of a prompt under one adapter is never read under another.

The base weights are not touched: each adapted linear layer adds ``scale * B(A(x))`` to the rows
of this step that belong to requests with the adapter.  Names, ranks and scales are PEFT's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from engines.embedded.core.errors import Invalid, Unsupported
from engines.plain_json import read_json
from engines.protocol.lora_config import (
    module_and_half,
    rank_and_scale,
    why_incomplete,
    why_unsupported,
)
from engines.tensors.torch_fingerprint import bytes_fingerprint, device_fingerprint

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Pair:
    """The two halves of one layer: ``down`` is ``[rank, in]``, ``up`` is ``[out, rank]``."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter as it was loaded.

    Attributes:
        salt: above 0, and of no other load: separates what is cached of its prompts.
        fingerprints: of its tensors, as they came, by their names.
    """

    name: str
    salt: int
    pairs: Mapping[str, Pair]
    fingerprints: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows ``start`` up to ``end`` of a step belong to requests with this adapter."""

    adapter: Adapter
    start: int
    end: int


class Adapters:
    """All adapters of one model, by name.

    Args:
        is_on_gpu: whether the model's fingerprints are made on a GPU.  An adapter's are then made
            in the same way: fingerprints of two ways have no common checksum.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        is_enabled: bool,
        max_rank: int,
        is_on_gpu: bool = False,
    ) -> None:
        self._fingerprint = device_fingerprint if is_on_gpu else bytes_fingerprint
        head = getattr(model, "lm_head", None)
        self._layers = {
            name: module
            for name, module in model.named_modules()
            # The head sees only the rows that make a token, so its rows are not the step's.
            if isinstance(module, torch.nn.Linear) and module is not head
        }
        self._is_enabled = is_enabled
        self._max_rank = max_rank
        self._loaded: dict[str, Adapter] = {}
        self._hooked: set[str] = set()
        self._salts = count(1)
        self._rows: tuple[AdapterRows, ...] = ()

    def names(self) -> list[str]:
        return list(self._loaded)

    def find(self, name: str | None) -> Adapter | None:
        """The adapter a request names, or None for none."""
        if name is None:
            return None
        found = self._loaded.get(name)
        if found is None:
            raise Invalid(f"LoRA adapter {name!r} is not loaded; loaded: {self.names()}")
        return found

    def load(
        self, name: str, config: Mapping[str, Any], named: Iterable[tuple[str, torch.Tensor]]
    ) -> Adapter:
        """Load a new adapter.

        Raises:
            Invalid: there is one of this name, or it does not fit the model.
            Unsupported: a kind of LoRA that this engine does not support.
        """
        if not self._is_enabled:
            raise Invalid("LoRA is not enabled: start with --enable-lora")
        if name in self._loaded:
            raise Invalid(f"LoRA adapter {name!r} is loaded already; unload it first")
        if why := why_incomplete(config):
            raise Invalid(f"an adapter's config {why}")
        if why := why_unsupported(config):
            raise Unsupported(f"an adapter's {why}")
        tensors = dict(named)
        pairs = {
            module: self._pair(module, halves, *rank_and_scale(config, module))
            for module, halves in _halves(tensors).items()
        }
        if not pairs:
            raise Invalid("the adapter holds no tensors")
        digests = {key: self._fingerprint(key, tensor) for key, tensor in tensors.items()}
        adapter = Adapter(name, next(self._salts), pairs, digests)
        for module in pairs:
            if module not in self._hooked:
                self._layers[module].register_forward_hook(self._hook(module))
                self._hooked.add(module)
        self._loaded[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        self.find(name)
        del self._loaded[name]

    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of all tensors of all adapters, named ``lora:<adapter>:<tensor>``."""
        return {
            f"lora:{adapter.name}:{tensor}": text
            for adapter in self._loaded.values()
            for tensor, text in adapter.fingerprints.items()
        }

    def plan_step(self, lengths: Iterable[tuple[Adapter | None, int]]) -> None:
        """Set the rows of the next step: (adapter, number of rows), in order."""
        rows: list[AdapterRows] = []
        start = 0
        for adapter, length in lengths:
            end = start + length
            if adapter is not None:
                if rows and rows[-1].adapter is adapter and rows[-1].end == start:
                    start = rows.pop().start
                rows.append(AdapterRows(adapter, start, end))
            start = end
        self._rows = tuple(rows)

    def _hook(self, module: str) -> Callable[..., None]:
        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            for rows in self._rows:
                pair = rows.adapter.pairs.get(module)
                if pair is not None:
                    part = inputs[0][..., rows.start : rows.end, :]
                    delta = (part @ pair.down.t()) @ pair.up.t()
                    output[..., rows.start : rows.end, :] += pair.scale * delta

        return add

    def _pair(
        self, module: str, halves: Mapping[str, torch.Tensor], rank: int, scale: float
    ) -> Pair:
        if rank > self._max_rank:
            raise Invalid(f"the adapter's rank {rank} is over --max-lora-rank {self._max_rank}")
        layer = self._layers.get(module)
        if layer is None:
            raise Invalid(f"the model has no linear layer {module!r} that an adapter can change")
        wanted = {"A": [rank, layer.in_features], "B": [layer.out_features, rank]}
        for half, shape in wanted.items():
            if half not in halves:
                raise Invalid(f"{module}: lora_{half} is missing")
            found = list(halves[half].shape)
            if found != shape:
                raise Invalid(f"{module}: lora_{half} has shape {found}, not {shape}")
        like = layer.weight
        down, up = (halves[half].detach().to(like.device, like.dtype, copy=True) for half in "AB")
        return Pair(down, up, scale)


def _halves(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = module_and_half(name)
        if found is None:
            raise Unsupported(f"adapter tensor {name!r} is no lora_A or lora_B of a linear layer")
        module, half = found
        halves.setdefault(module, {})[half] = tensor
    return halves


def read_adapter(path: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of an adapter folder as PEFT saves it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path)
    try:
        config = read_json((folder / CONFIG_FILE).read_bytes())
        return config, load_file(folder / TENSOR_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise Invalid(f"cannot read an adapter from {path}: {error}") from None
