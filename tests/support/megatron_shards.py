"""A mixture of experts cut as Megatron cuts it, and gathered as Megatron-Bridge does.

Tensor parallelism (TP) cuts rows or columns of a tensor, expert parallelism (EP) shares out the
experts.  Four ranks: rank ``2 * ep + tp``; the experts are cut by the same TP ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

TP = EP = 2
# The dimension that TP cuts; None: all ranks have the whole.
_PLAIN = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", 0),
    "decoder.final_layernorm.weight": ("model.norm.weight", None),
    "output_layer.weight": ("lm_head.weight", 0),
}
_OF_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", None),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.router.weight": ("mlp.gate.weight", None),
}


@dataclass(frozen=True)
class Sizes:
    """What Megatron's model knows of its attention and experts."""

    num_layers: int
    num_groups: int
    head_dim: int
    num_experts: int
    vocab_size: int


@dataclass
class MegatronShards:
    """One rank's shards of a model.

    Attributes:
        shards: Megatron's name -> this rank's part and the dimension that TP cuts.
    """

    rank: int
    sizes: Sizes
    shards: dict[str, tuple[torch.Tensor, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = range(TP * EP)
        self.tp, self.ep = self.rank % TP, self.rank // TP
        tp_groups = [dist.new_group([rank for rank in ranks if rank // TP == n]) for n in range(EP)]
        ep_groups = [dist.new_group([rank for rank in ranks if rank % TP == n]) for n in range(TP)]
        self._tp_group, self._ep_group = tp_groups[self.ep], ep_groups[self.tp]

    def cut(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Keep this rank's part of the checkpoint's tensors, and nothing else of them."""
        self.shards = {}
        for name, (of_checkpoint, dim) in _PLAIN.items():
            if of_checkpoint in whole:
                tensor = whole[of_checkpoint]
                if dim == 0:  # Megatron pads the vocabulary, so that all ranks have as many rows
                    tensor = torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % TP))
                self._keep(name, tensor, dim)
        for layer in range(self.sizes.num_layers):
            at, megatrons = f"model.layers.{layer}", f"decoder.layers.{layer}"
            for name, (of_checkpoint, dim) in _OF_LAYER.items():
                self._keep(f"{megatrons}.{name}", whole[f"{at}.{of_checkpoint}"], dim)
            parts = [whole[f"{at}.self_attn.{part}_proj.weight"] for part in "qkv"]
            grouped = [part.unflatten(0, (self.sizes.num_groups, -1)) for part in parts]
            fused = torch.cat(grouped, dim=1).flatten(0, 1)
            self._keep(f"{megatrons}.self_attention.linear_qkv.weight", fused, 0)
            self._cut_experts(whole, f"{at}.mlp.experts", f"{megatrons}.mlp.experts")

    def _cut_experts(self, whole: Mapping[str, torch.Tensor], at: str, megatrons: str) -> None:
        per_rank = self.sizes.num_experts // EP
        for local in range(per_rank):
            expert = f"{at}.{self.ep * per_rank + local}"
            gate, up = (whole[f"{expert}.{part}_proj.weight"] for part in ("gate", "up"))
            own = torch.cat([part.chunk(TP)[self.tp] for part in (gate, up)])
            self.shards[f"{megatrons}.linear_fc1.weight{local}"] = own, 0
            self._keep(
                f"{megatrons}.linear_fc2.weight{local}", whole[f"{expert}.down_proj.weight"], 1
            )

    def _keep(self, name: str, whole: torch.Tensor, dim: int | None) -> None:
        own = whole if dim is None else whole.chunk(TP, dim)[self.tp]
        self.shards[name] = own.clone(), dim

    def gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors in the same order on all ranks; an expert's name has its own number."""
        for name, (own, dim) in self.shards.items():
            tensor = own if dim is None else self._over_tp(name, own, dim)
            if ".experts." not in name:
                yield name, tensor
                continue
            stem, _, local = name.rpartition("weight")
            per_rank = self.sizes.num_experts // EP
            for ep, expert in enumerate(_all_gather(tensor, self._ep_group, EP)):
                yield f"{stem}weight{ep * per_rank + int(local)}", expert

    def _over_tp(self, name: str, own: torch.Tensor, dim: int) -> torch.Tensor:
        parts = _all_gather(own, self._tp_group, TP)
        if ".linear_fc1." not in name:
            return torch.cat(parts, dim)
        # Each part is a piece of the gate and one of the up projection.
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])

    def to_checkpoint(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """A name map from Megatron's names and fused tensors."""
        if name in _PLAIN:
            of_checkpoint, dim = _PLAIN[name]
            yield of_checkpoint, tensor if dim is None else tensor[: self.sizes.vocab_size]
            return
        _, _, layer, rest = name.split(".", 3)
        at = f"model.layers.{layer}"
        if rest in _OF_LAYER:
            yield f"{at}.{_OF_LAYER[rest][0]}", tensor
        elif rest.endswith("linear_qkv.weight"):
            grouped = tensor.unflatten(0, (self.sizes.num_groups, -1, self.sizes.head_dim))
            for part, heads in zip(
                "qkv", (slice(0, -2), slice(-2, -1), slice(-1, None)), strict=True
            ):
                yield f"{at}.self_attn.{part}_proj.weight", grouped[:, heads].flatten(0, 2)
        else:
            _, fc, weight = rest.rsplit(".", 2)
            expert = f"{at}.mlp.experts.{weight.removeprefix('weight')}"
            if fc == "linear_fc2":
                yield f"{expert}.down_proj.weight", tensor
            else:
                gate, up = tensor.chunk(2)
                yield f"{expert}.gate_proj.weight", gate
                yield f"{expert}.up_proj.weight", up


def _all_gather(own: torch.Tensor, group: Any, size: int) -> list[torch.Tensor]:
    own = own.contiguous()
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own, group=group)
    return parts
