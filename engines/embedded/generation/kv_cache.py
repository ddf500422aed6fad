"""transformers' paged KV cache, placed in the memory of the ``kv_cache`` tag.

The stock cache makes its own tensor.  This one is planned on the meta device, where a tensor
costs nothing, and then given the tensor of the region: nothing is allocated twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.requests import FutureRequestState

from engines.embedded.generation.attention import NAME, AttentionBucket, BatchedSequence, plan
from engines.embedded.generation.generation import Generation
from engines.embedded.memory.regions import Memory
from engines.protocol import MemoryTag


class RegionCache(PagedAttentionCache):
    """Paged cache in a region.

    Attributes:
        is_bucketed: attention is ours (see ``attention``).
        plan: this step's attention buckets.
        generation_of: request id -> its generation.
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
        self.is_bucketed = self.config._attn_implementation == NAME
        self.plan: list[AttentionBucket] = []
        self.prefix_hits: dict[str, int] = {}
        self.generation_of: Callable[[str], Generation | None] = lambda _: None

    def plan_step(self, batch: Sequence[FutureRequestState]) -> None:
        """Plan the attention of a step, once for all layers."""
        allocator: Any = self.layer_to_allocator[0]
        self._clear_new_blocks(allocator, batch)
        stride = allocator.block_physical_stride // allocator.tokens_per_page
        members = [
            BatchedSequence(
                request.query_length,
                request.state.position_offset,
                [block * stride for block in allocator.block_table[request.state.request_id]],
            )
            for request in batch
        ]
        self.plan = plan(members, allocator.tokens_per_page, torch.device(self.device))

    def _clear_new_blocks(self, allocator: Any, batch: Sequence[FutureRequestState]) -> None:
        """Zero the blocks that this step writes first.  Reading by whole pages also copies what
        an earlier request wrote behind the newest token; masked it does no harm unless it is NaN
        (lost weights, an overflow), which no mask stops."""
        size = allocator.tokens_per_page
        new: list[int] = []
        for request in batch:
            num_keys = request.state.position_offset
            num_past = num_keys - request.query_length
            if -(-num_keys // size) > -(-num_past // size):
                table = allocator.block_table[request.state.request_id]
                new += table[-(-num_past // size) :]
        if new:
            allocator._copy_view.index_fill_(0, torch.tensor(new, device=self.device), 0)

    def pages_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each ``[pages, page_size, kv_heads, head_dim]``."""
        allocator: Any = self.layer_to_allocator[layer]
        return allocator.get_cache_for_block_table(layer)  # type: ignore[no-any-return]

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        generation = self.generation_of(request_id)
        if generation is not None and generation.wants_experts:
            return 0  # the cache does not have the experts of its tokens
        adapter = None if generation is None else generation.adapter
        wanted = prompt_ids if adapter is None else adapter.salted(prompt_ids)
        matched: int = super().search_prefix_match(request_id, wanted)
        if matched:
            self.prefix_hits[request_id] = matched
        return matched

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        adapter = state.generation.adapter
        if adapter is not None:
            state = SimpleNamespace(
                request_id=state.request_id,
                status=state.status,
                initial_tokens=adapter.salted(state.initial_tokens + state.generated_tokens),
                generated_tokens=[],
            )
        super().mark_complete_blocks(state, complete_blocks)
