"""Bucketed attention against the plain formula, one sequence at a time."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.embedded
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8

BATCHES = {
    "decode only": [(1, 5), (1, 7), (1, 30), (1, 1)],
    "prompts of one length": [(6, 6), (6, 6)],
    "prompts of unlike lengths": [(5, 5), (7, 7), (1, 1), (33, 33)],
    "prompts after a cached prefix": [(3, 19), (4, 20), (8, 24)],
    "all at once": [(1, 9), (6, 6), (1, 100), (5, 37), (12, 12), (1, 3)],
}


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
def test_every_sequence_gets_what_it_would_get_alone(lengths: list[tuple[int, int]]) -> None:
    import torch
    from engines.embedded import attention

    torch.manual_seed(random.Random(0).randrange(100))
    num_queries = sum(q for q, _ in lengths)
    num_keys = sum(k for _, k in lengths)
    query = torch.randn(1, HEADS, num_queries, HEAD_DIM)
    key, value = torch.randn(2, 1, KV_HEADS, num_keys, HEAD_DIM)
    cache: Any = SimpleNamespace(
        update=lambda key, value, *_: (key, value),
        plan=attention.plan(lengths, torch.device("cpu")),
    )
    module: Any = SimpleNamespace(layer_idx=0)
    output, _ = attention.forward(module, query, key, value, cache=cache, scaling=0.3)
    query_start = key_start = 0
    for num_q, num_k in lengths:
        q = query[0, :, query_start : query_start + num_q]
        k = key[0, :, key_start : key_start + num_k].repeat_interleave(HEADS // KV_HEADS, 0)
        v = value[0, :, key_start : key_start + num_k].repeat_interleave(HEADS // KV_HEADS, 0)
        scores = q @ k.transpose(1, 2) * 0.3
        visible = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
        got = output[0, query_start : query_start + num_q].transpose(0, 1)
        torch.testing.assert_close(got, expected)
        query_start += num_q
        key_start += num_k
