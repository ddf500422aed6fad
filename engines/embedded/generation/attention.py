"""Attention over a batch of sequences of unlike lengths, without a mask over the whole cache.

transformers' own CPU path (``sdpa``) copies out the keys of all requests and scores every query
against every one of them, to mask most away: the work grows with the square of the number of
requests.  Here sequences of like shape are padded together, their keys are copied out by whole
pages, and each bucket is one call.  Models with sliding windows keep transformers' path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "embedded_bucketed"


@dataclass(frozen=True, slots=True)
class BatchedSequence:
    """One sequence of a step: new tokens, tokens with the cached ones, pages in the cache."""

    query_length: int
    key_length: int
    pages: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class AttentionBucket:
    """Sequences of the batch that are padded to one shape.

    Attributes:
        queries: positions in the flat batch, ``[sequences * query_length]``; None: all, in order.
        pages: pages of the cache that hold their keys, ``[sequences * pages_each]``; None for
            fresh prompts, whose keys are at ``queries``.
        mask: which keys a query sees, ``[sequences, 1, queries, keys]``; None: plainly causal.
        kept: where the unpadded queries are in ``queries``; None: all of them.
        targets: where their outputs go in the flat batch.
    """

    num_sequences: int
    query_length: int
    queries: torch.Tensor | None
    pages: torch.Tensor | None
    mask: torch.Tensor | None
    kept: torch.Tensor | None
    targets: torch.Tensor


def plan(
    members: Sequence[BatchedSequence], page_size: int, device: torch.device
) -> list[AttentionBucket]:
    """Buckets for a batch of these sequences, in order."""
    groups: dict[tuple[int, int, bool], list[tuple[int, BatchedSequence]]] = {}
    start = 0
    for member in members:
        is_fresh = member.query_length == member.key_length
        shape = (_rounded(member.query_length), _rounded(member.key_length), is_fresh)
        groups.setdefault(shape, []).append((start, member))
        start += member.query_length
    return [_bucket(group, page_size, start, device) for group in groups.values()]


def _rounded(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _bucket(
    group: Sequence[tuple[int, BatchedSequence]],
    page_size: int,
    num_tokens: int,
    device: torch.device,
) -> AttentionBucket:
    """The bucket of sequences of one shape, each with its position in the batch's tokens."""
    starts, members = zip(*group, strict=True)
    query_lengths = torch.tensor([member.query_length for member in members]).unsqueeze(1)
    key_lengths = torch.tensor([member.key_length for member in members]).unsqueeze(1)
    longest = int(query_lengths.max())
    steps = torch.arange(longest)
    inside = steps < query_lengths
    # A padded query repeats its sequence's last one; its output is not kept.
    queries = torch.tensor(starts).unsqueeze(1) + torch.minimum(steps, query_lengths - 1)
    is_even = bool(inside.all())
    pages = None
    num_keys = longest
    if members[0].query_length != members[0].key_length:
        each = -(-int(key_lengths.max()) // page_size)
        num_keys = each * page_size
        # A missing page repeats the first one; the mask hides it.
        rows = [[*m.pages[:each], *[m.pages[0]] * (each - len(m.pages))] for m in members]
        pages = torch.tensor(rows).flatten().to(device)
    mask = None
    if pages is not None or not is_even:
        last_seen = key_lengths - query_lengths + torch.minimum(steps, query_lengths - 1)
        mask = (torch.arange(num_keys) <= last_seen.unsqueeze(2)).unsqueeze(1).to(device)
    is_whole = is_even and len(members) * longest == num_tokens
    return AttentionBucket(
        num_sequences=len(members),
        query_length=longest,
        queries=None if is_whole else queries.flatten().to(device),
        pages=pages,
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
    """transformers' attention interface; ``cache`` is a ``RegionCache`` with this step's plan.

    Without one it is a single fresh prompt by itself, which leaves nothing in the cache.
    """
    if cache is None:
        is_grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=is_grouped
        )
        return out.transpose(1, 2), None
    layer: Any = module.layer_idx
    cache.update(key, value, layer, kwargs)  # writes; the reading is ours, see ``Runner``
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    stored = cache.pages_of(layer)
    if len(cache.plan) == 1 and cache.plan[0].queries is None:
        return _attend(cache.plan[0], query, key, value, stored, scaling).unsqueeze(0), None
    output = query.new_empty(query.shape)  # [tokens, heads, head_dim]
    for bucket in cache.plan:
        part = _attend(bucket, query, key, value, stored, scaling)
        if bucket.kept is not None:
            part = part.index_select(0, bucket.kept)
        output.index_copy_(0, bucket.targets, part)
    return output.unsqueeze(0), None


def _attend(
    bucket: AttentionBucket,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """Attention of one bucket, ``[sequences * query_length, heads, head_dim]``."""
    sequences, head_dim = bucket.num_sequences, query.shape[-1]
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    q = query if bucket.queries is None else query.index_select(0, bucket.queries)
    if bucket.pages is not None:
        k, v = (part.index_select(0, bucket.pages) for part in stored)
    elif bucket.queries is not None:
        k, v = (part.index_select(0, bucket.queries) for part in (key, value))
    else:
        k, v = key, value
    k, v = (part.reshape(sequences, -1, num_kv_heads, head_dim).transpose(1, 2) for part in (k, v))
    if bucket.query_length == 1:
        # Heads that share keys are queries of one sequence: no repeated keys needed.
        q = q.reshape(sequences, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask, scale=scaling)
        return out.reshape(sequences, num_heads, head_dim)
    q = q.reshape(sequences, bucket.query_length, num_heads, head_dim).transpose(1, 2)
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
