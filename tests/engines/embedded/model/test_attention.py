"""Bucketed attention against the plain formula, one sequence at a time."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

pytestmark = pytest.mark.embedded
HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 8, 4

BATCHES = {
    "decode only": [(1, 5), (1, 7), (1, 30), (1, 1)],
    "prompts of one length": [(6, 6), (6, 6)],
    "prompts of unlike lengths": [(5, 5), (7, 7), (1, 1), (33, 33)],
    "prompts after a cached prefix": [(3, 19), (4, 20), (8, 24)],
    "all at once": [(1, 9), (6, 6), (1, 100), (5, 37), (12, 12), (1, 3)],
}


def in_pages(key: Any, value: Any, key_lengths: list[int]) -> tuple[Any, list[list[int]]]:
    """Keys and values ``[heads, keys, dim]`` as pages in shuffled places, and where they are."""
    import torch

    counts = [-(-length // PAGE) for length in key_lengths]
    places = random.Random(1).sample(range(2 * sum(counts)), sum(counts))
    stored = torch.full((2, 2 * sum(counts), PAGE, KV_HEADS, HEAD_DIM), 7.0)
    tables, start = [], 0
    for length, count in zip(key_lengths, counts, strict=True):
        table = [places.pop() for _ in range(count)]
        for index in range(length):
            spot = (table[index // PAGE], index % PAGE)
            stored[0][spot] = key[:, start + index]
            stored[1][spot] = value[:, start + index]
        tables.append(table)
        start += length
    return (stored[0], stored[1]), tables


def newest(lengths: list[tuple[int, int]]) -> list[int]:
    """Where each sequence's new tokens are among all keys."""
    ends = itertools.accumulate(k for _, k in lengths)
    return [
        place for (q, _), end in zip(lengths, ends, strict=True) for place in range(end - q, end)
    ]


@pytest.mark.parametrize("window", [None, 1, 3, 4, 6, 64])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_every_sequence_gets_what_it_would_get_alone(
    lengths: list[tuple[int, int]], window: int | None
) -> None:
    import torch
    from engines.embedded.model import attention

    torch.manual_seed(0)
    num_keys = sum(k for _, k in lengths)
    num_queries = sum(q for q, _ in lengths)
    query = torch.randn(HEADS, num_queries, HEAD_DIM)
    key, value = torch.randn(2, KV_HEADS, num_keys, HEAD_DIM)
    stored, tables = in_pages(key, value, [k for _, k in lengths])
    members = [
        attention.BatchedSequence(q, k, table)
        for (q, k), table in zip(lengths, tables, strict=True)
    ]
    buckets = attention.plan(members, PAGE, torch.device("cpu"), window)
    new = newest(lengths)
    q, k, v = (part.transpose(0, 1) for part in (query, key[:, new], value[:, new]))
    output = attention.attend(buckets, q, k, v, stored, 0.3)
    query_start = key_start = 0
    for num_q, num_k in lengths:
        q = query[:, query_start : query_start + num_q]
        k = key[:, key_start : key_start + num_k].repeat_interleave(HEADS // KV_HEADS, 0)
        v = value[:, key_start : key_start + num_k].repeat_interleave(HEADS // KV_HEADS, 0)
        scores = q @ k.transpose(1, 2) * 0.3
        visible = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        if window is not None:
            visible &= ~visible.tril(num_k - num_q - window)
        expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
        got = output[query_start : query_start + num_q].transpose(0, 1)
        torch.testing.assert_close(got, expected)
        query_start += num_q
        key_start += num_k
