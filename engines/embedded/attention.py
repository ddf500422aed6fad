"""Attention over a batch of sequences of unlike lengths, without a mask over the whole cache.

transformers' own CPU path (``sdpa``) scores every query against every cached token of *all*
requests and masks the rest away: the work grows with the square of the number of requests.
Here sequences of like shape are padded together and each bucket is one call, so the work grows
with their number.  Models with sliding windows keep transformers' path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "embedded_bucketed"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of the batch that are padded to one shape.

    Attributes:
        queries: positions in the flat batch, ``[sequences * query_length]``.
        keys: positions in the flat keys, ``[sequences * key_length]``.
        mask: which keys a query sees, broadcastable to ``[sequences, 1, queries, keys]``; None
            for fresh prompts of one length, which are plainly causal.
        kept: where the unpadded queries are in ``queries``.  None: all of them.
    """

    num_sequences: int
    query_length: int
    key_length: int
    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None
    kept: torch.Tensor | None
    targets: torch.Tensor


def plan(lengths: Sequence[tuple[int, int]], device: torch.device) -> list[Bucket]:
    """Buckets for a batch whose sequences have these (query, key) lengths, in order."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (query_length, key_length) in enumerate(lengths):
        shape = (_rounded(query_length), _rounded(key_length))
        groups.setdefault(shape, []).append(index)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    starts = sizes.cumsum(0) - sizes
    return [_bucket(sizes[group], starts[group], device) for group in groups.values()]


def _rounded(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _bucket(sizes: torch.Tensor, starts: torch.Tensor, device: torch.device) -> Bucket:
    query_length, key_length = (int(size) for size in sizes.amax(0))
    steps = torch.arange(query_length)
    inside = steps < sizes[:, :1]
    # A padded query or key repeats its sequence's last one; it is masked away or not kept.
    queries = starts[:, :1] + torch.minimum(steps, sizes[:, :1] - 1)
    places = torch.arange(key_length)
    keys = starts[:, 1:] + torch.minimum(places, sizes[:, 1:] - 1)
    past = sizes[:, 1] - sizes[:, 0]
    is_even = bool(inside.all())
    mask = None
    if not (is_even and not past.any() and query_length == key_length):
        last_seen = (past[:, None] + steps).clamp(max=key_length - 1)
        mask = (places <= last_seen[:, :, None]).unsqueeze(1).to(device)
    return Bucket(
        num_sequences=len(sizes),
        query_length=query_length,
        key_length=key_length,
        queries=queries.flatten().to(device),
        keys=keys.flatten().to(device),
        mask=mask,
        kept=None if is_even else inside.flatten().nonzero().squeeze(1).to(device),
        targets=queries[inside].to(device),
    )


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; ``cache`` is a ``RegionCache`` with this step's plan."""
    key, value = cache.update(key, value, module.layer_idx, kwargs)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    output = torch.empty_like(query)  # [tokens, heads, head_dim]
    for bucket in cache.plan:
        part = _attend(bucket, query, key, value, scaling)
        if bucket.kept is not None:
            part = part[bucket.kept]
        output[bucket.targets] = part
    return output.unsqueeze(0), None


def _attend(
    bucket: Bucket,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of one bucket, ``[sequences * query_length, heads, head_dim]``."""
    sequences, head_dim = bucket.num_sequences, query.shape[-1]
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    k = key[bucket.keys].view(sequences, bucket.key_length, num_kv_heads, head_dim).transpose(1, 2)
    v = value[bucket.keys].view(sequences, bucket.key_length, num_kv_heads, head_dim)
    v = v.transpose(1, 2)
    q = query[bucket.queries]
    if bucket.query_length == 1:
        # Heads that share keys are queries of one sequence: no repeated keys needed.
        q = q.view(sequences, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask, scale=scaling)
        return out.reshape(sequences, num_heads, head_dim)
    q = q.view(sequences, bucket.query_length, num_heads, head_dim).transpose(1, 2)
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=bucket.mask,
        is_causal=bucket.mask is None,
        scale=scaling,
        enable_gqa=num_heads != num_kv_heads,
    )
    return out.transpose(1, 2).reshape(-1, num_heads, head_dim)
