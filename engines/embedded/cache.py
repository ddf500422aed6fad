"""transformers' paged KV cache, placed in the memory of the ``kv_cache`` tag.

The stock cache makes its own tensor.  This one is planned on the meta device, where a tensor
costs nothing, and then given the tensor of the region: nothing is allocated twice.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import CachePool

from engines.embedded.attention import Bucket
from engines.embedded.memory import Memory
from engines.protocol import MemoryTag


class RegionCache(PagedAttentionCache):
    """Paged cache in a region.

    Attributes:
        plan: this step's attention buckets (see ``attention``).
        prefix_hits: request id -> tokens of its prompt found in the cache, until collected.
    """

    def __init__(self, memory: Memory, **options: Any) -> None:
        super().__init__(device=torch.device("meta"), **options)
        nbytes = self.cache_tensor.numel()
        layout = [(torch.Size([nbytes]), torch.uint8)]
        (self.cache_tensor,) = memory.allocate(MemoryTag.KV_CACHE, layout)
        self.device = memory.device
        self.pool = CachePool(self.num_sectors, len(self.cache_allocators))
        for allocator in self.cache_allocators.values():
            allocator.register_cache_tensor(
                self.bytes_per_sector,
                self.num_sectors * self.bytes_per_sector,
                self.cache_tensor,
                self.pool,
            )
        self.plan: list[Bucket] = []
        self.prefix_hits: dict[str, int] = {}

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        matched: int = super().search_prefix_match(request_id, prompt_ids)
        if matched:
            self.prefix_hits[request_id] = matched
        return matched
