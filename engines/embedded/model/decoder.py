"""The decoder: Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE as one forward pass in plain torch.

Always true: modules and parameters have the names that transformers gives to them, and each value
is computed in the order and type in which transformers computes it (tests hold the logits against
its own).

A batch is flat: all new tokens of all sequences, one after the other.  What a sequence has in the
cache is known only to ``Step``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engines.embedded.core.model_config import ModelConfig
from engines.embedded.model.attention import AttentionBucket, Stored, attend
from engines.embedded.model.rope import frequencies


@dataclass(slots=True)
class Step:
    """One pass over a batch of ``tokens``.

    Attributes:
        tokens: ids, ``[tokens]``.
        positions: of each in its sequence, ``[tokens]``.
        plans: attention buckets, for each window that a layer has.
        slots: where keys and values of each token go in the cache, ``[tokens]``.
        cache: of each layer, or empty for a pass that leaves nothing behind.
        experts: gets the experts of each token and sparse layer, ``[tokens, experts]``, or None
            where they are not wanted.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    plans: Mapping[int | None, Sequence[AttentionBucket]]
    slots: torch.Tensor | None = None
    cache: Sequence[Stored] = ()
    experts: list[torch.Tensor] | None = None


class Linear(nn.Linear):
    """A linear layer without a value: its parameters are read from a checkpoint."""

    def __init__(
        self, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = False
    ) -> None:
        super().__init__(inputs, outputs, bias, device="meta", dtype=dtype)

    def reset_parameters(self) -> None:
        """Nothing: there is no memory yet."""


def _weight(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


class Norm(nn.Module):
    """Root mean square norm over the last dimension, in float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _weight(dtype, size)
        self._size, self._eps = (size,), eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # Its own weight would be applied before the rounding to a narrower type.
        return self.weight * functional.rms_norm(hidden, self._size, None, self._eps)


class Embedding(nn.Module):
    """The rows of its weight, by token id."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _weight(dtype, config.vocab_size, config.hidden_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.weight)


class Attention(nn.Module):
    """Self-attention of one layer."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._index, self._window = index, config.windows[index]
        self._head_dim, self._scaling = config.head_dim, config.head_dim**-0.5
        hidden, bias = config.hidden_size, config.qkv_bias
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(hidden, width, dtype, bias=bias)
        self.k_proj = Linear(hidden, kv_width, dtype, bias=bias)
        self.v_proj = Linear(hidden, kv_width, dtype, bias=bias)
        self.o_proj = Linear(width, hidden, dtype, bias=config.out_bias)
        if config.has_qk_norm:
            self.q_norm = Norm(config.head_dim, config.rms_norm_eps, dtype)
            self.k_norm = Norm(config.head_dim, config.rms_norm_eps, dtype)
        self._has_qk_norm = config.has_qk_norm

    def forward(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], step: Step
    ) -> torch.Tensor:
        heads = (len(hidden), -1, self._head_dim)
        query, key = self.q_proj(hidden).view(heads), self.k_proj(hidden).view(heads)
        value = self.v_proj(hidden).view(heads)
        if self._has_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = _rotated(query, *rotation), _rotated(key, *rotation)
        stored = step.cache[self._index] if step.cache else None
        if stored is not None and step.slots is not None:
            for part, new in zip(stored, (key, value), strict=True):
                part.flatten(0, 1).index_copy_(0, step.slots, new)
        plan = step.plans[self._window]
        output = attend(plan, query, key, value, stored, self._scaling)
        projected: torch.Tensor = self.o_proj(output.flatten(1))
        return projected


def _rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """``heads`` ``[tokens, heads, head_dim]`` turned; the first half of ``sine`` is negative."""
    return heads * cosine + heads.roll(heads.shape[-1] // 2, -1) * sine


class Mlp(nn.Module):
    """Feed-forward layer with a gate."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, dtype, bias=bias)
        self.up_proj = Linear(hidden, inner, dtype, bias=bias)
        self.down_proj = Linear(inner, hidden, dtype, bias=bias)

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        gate = functional.silu(self.gate_proj(hidden))
        output: torch.Tensor = self.down_proj(gate * self.up_proj(hidden))
        return output


class Router(nn.Module):
    """Chooses the experts of each token."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _weight(dtype, config.num_experts, config.hidden_size)
        self._count, self._is_normalized = config.num_experts_per_tok, config.norm_topk_prob

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and indices of the chosen experts, each ``[tokens, experts]``."""
        logits = functional.linear(hidden, self.weight)
        weights, chosen = logits.softmax(dim=-1, dtype=torch.float32).topk(self._count, dim=-1)
        if self._is_normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(hidden.dtype), chosen


class Experts(nn.Module):
    """All experts of a layer, in two stacked parameters; a checkpoint has them one by one."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        num, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = _weight(dtype, num, 2 * inner, hidden)
        self.down_proj = _weight(dtype, num, hidden, inner)

    def forward(
        self, hidden: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        # Rows of one expert lie together, and go back to their places at the end.
        order = chosen.flatten().argsort(stable=True)
        rows = hidden.index_select(0, order // chosen.shape[1])
        output = torch.empty_like(rows)
        start = 0
        counts = chosen.flatten().bincount(minlength=len(self.down_proj))
        for expert, count in enumerate(counts.tolist()):
            if count:
                part = slice(start, start + count)
                joined = functional.linear(rows[part], self.gate_up_proj[expert])
                gate, up = joined.chunk(2, dim=-1)
                output[part] = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
                start += count
        placed = torch.empty_like(output).index_copy_(0, order, output)
        return (placed.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


class SparseMlp(nn.Module):
    """A mixture of experts."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Router(config, dtype)
        self.experts = Experts(config, dtype)

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        weights, chosen = self.gate(hidden)
        if step.experts is not None:
            step.experts.append(chosen)
        output: torch.Tensor = self.experts(hidden, weights, chosen)
        return output


class Layer(nn.Module):
    """Attention, then the feed-forward part, each added to what came in."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = Attention(config, index, dtype)
        is_sparse = index in config.sparse_layers
        self.mlp = SparseMlp(config, dtype) if is_sparse else Mlp(config, dtype)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], step: Step
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, step)
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden), step)
        return output


class Trunk(nn.Module):
    """Everything but the head."""

    inverse_periods: torch.Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config, dtype)
        self.layers = nn.ModuleList(
            Layer(config, index, dtype) for index in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps, dtype)
        periods, self._rope_scale = frequencies(config.rope, config.head_dim)
        self.register_buffer("inverse_periods", periods, persistent=False)

    def forward(self, step: Step) -> torch.Tensor:
        hidden = self.embed_tokens(step.tokens)
        angles = step.positions.unsqueeze(1).float() * self.inverse_periods
        cosine, sine = angles.cos() * self._rope_scale, angles.sin() * self._rope_scale
        rotation = (
            torch.cat((cosine, cosine), -1).unsqueeze(1).to(hidden.dtype),
            torch.cat((-sine, sine), -1).unsqueeze(1).to(hidden.dtype),
        )
        for layer in self.layers:
            hidden = layer(hidden, rotation, step)
        output: torch.Tensor = hidden
        return output


class Decoder(nn.Module):
    """A causal language model, without memory until it is placed."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.model = Trunk(config, dtype)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, step: Step, rows: Any) -> torch.Tensor:
        """Logits of these rows of the batch (an index or a slice), ``[rows, vocabulary]``."""
        logits: torch.Tensor = self.lm_head(self.model.norm(self.model(step)[rows]))
        return logits
