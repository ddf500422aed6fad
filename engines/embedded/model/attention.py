"""Attention over a batch of sequences of unlike lengths, without a mask over the whole cache.

Sequences of like shape are padded together, their keys are copied out by whole pages, and each
bucket is one call: the work grows with the number of requests, not with its square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

Stored = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer in the cache, each ``[pages, page_size, kv_heads, head_dim]``."""


@dataclass(frozen=True, slots=True)
class BatchedSequence:
    """One sequence of a step: new tokens, tokens with the cached ones, pages in the cache."""

    query_length: int
    key_length: int
    pages: Sequence[int] = ()

    @property
    def is_fresh(self) -> bool:
        return self.query_length == self.key_length

    def within(self, window: int | None, page_size: int) -> BatchedSequence:
        """The same without the pages that no query sees."""
        if window is None or self.is_fresh:
            return self
        unseen = max(0, self.key_length - self.query_length - window + 1) // page_size
        return BatchedSequence(
            self.query_length, self.key_length - unseen * page_size, self.pages[unseen:]
        )


@dataclass(frozen=True, slots=True)
class AttentionBucket:
    """Sequences of the batch that are padded to one shape.

    Attributes:
        queries: positions in the flat batch, ``[sequences * query_length]``; None: all, in order.
        pages: pages of the cache that hold their keys, ``[sequences * pages_each]``, or None for
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
    members: Sequence[BatchedSequence],
    page_size: int,
    device: torch.device,
    window: int | None = None,
) -> list[AttentionBucket]:
    """Buckets for a batch of these sequences, in order; a token sees ``window`` keys, or all."""
    groups: dict[tuple[int, int, bool], list[tuple[int, BatchedSequence]]] = {}
    start = 0
    for member in members:
        seen = member.within(window, page_size)
        shape = (_rounded(seen.query_length), _rounded(seen.key_length), member.is_fresh)
        groups.setdefault(shape, []).append((start, seen))
        start += member.query_length
    return [
        _bucket(group, page_size, start, device, is_fresh=is_fresh, window=window)
        for (_, _, is_fresh), group in groups.items()
    ]


def _rounded(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _bucket(
    group: Sequence[tuple[int, BatchedSequence]],
    page_size: int,
    num_tokens: int,
    device: torch.device,
    *,
    is_fresh: bool,
    window: int | None,
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
    if not is_fresh:
        each = -(-int(key_lengths.max()) // page_size)
        num_keys = each * page_size
        # A missing page repeats the first one; the mask hides it.
        rows = [[*m.pages[:each], *[m.pages[0]] * (each - len(m.pages))] for m in members]
        pages = torch.tensor(rows).flatten().to(device)
    mask = None
    if pages is not None or not is_even or (window is not None and longest > window):
        last_seen = key_lengths - query_lengths + torch.minimum(steps, query_lengths - 1)
        behind = last_seen.unsqueeze(2) - torch.arange(num_keys)
        seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        mask = seen.unsqueeze(1).to(device)
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


def attend(
    buckets: Sequence[AttentionBucket],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stored: Stored | None,
    scaling: float,
) -> torch.Tensor:
    """Attention of a planned batch, ``[tokens, heads, head_dim]``.

    Args:
        query: of the new tokens, ``[tokens, heads, head_dim]``.
        key: theirs, as ``value``: ``[tokens, kv_heads, head_dim]``.
        stored: the cache, which has them already, or None where all sequences are fresh.
    """
    if len(buckets) == 1 and buckets[0].queries is None:
        return _attend(buckets[0], query, key, value, stored, scaling)
    output = torch.empty_like(query)
    for bucket in buckets:
        part = _attend(bucket, query, key, value, stored, scaling)
        if bucket.kept is not None:
            part = part.index_select(0, bucket.kept)
        output.index_copy_(0, bucket.targets, part)
    return output


def _attend(
    bucket: AttentionBucket,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stored: Stored | None,
    scaling: float,
) -> torch.Tensor:
    """Attention of one bucket, ``[sequences * query_length, heads, head_dim]``."""
    sequences, head_dim = bucket.num_sequences, query.shape[-1]
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    q = query if bucket.queries is None else query.index_select(0, bucket.queries)
    if bucket.pages is not None and stored is not None:
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
