"""Keys and values of all sequences, in pages in the memory of the ``kv_cache`` tag."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.embedded.generation.pages import PAGE_SIZE
from engines.embedded.generation.scheduler import Part
from engines.embedded.memory.regions import Memory
from engines.embedded.model.attention import AttentionBucket, BatchedSequence, Stored, plan
from engines.embedded.model.decoder import Decoder, Step
from engines.protocol import MemoryTag


class KvCache:
    """The cache of one model.

    Attributes:
        layers: keys and values of each, ``[pages, PAGE_SIZE, kv_heads, head_dim]``.
    """

    def __init__(self, model: Decoder, memory: Memory, num_pages: int) -> None:
        config = model.config
        of_page = (PAGE_SIZE, config.num_key_value_heads, config.head_dim)
        layout = [(torch.Size((config.num_hidden_layers, 2, num_pages, *of_page)), model.dtype)]
        (self._all,) = memory.allocate(MemoryTag.KV_CACHE, layout)
        self._device = memory.device
        self._windows = set(config.windows)
        self.layers: list[Stored] = [(keys, values) for keys, values in self._all]

    def step(self, parts: Sequence[Part]) -> Step:
        """The pass that computes these parts, planned once for all layers."""
        self._clear([page for part in parts for page in part.new_pages])
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        members = []
        for part in parts:
            begin = part.sequence.num_cached
            end = begin + part.num_tokens
            pages = part.sequence.pages
            tokens += part.sequence.ids[begin:end]
            positions += range(begin, end)
            slots.extend(
                pages[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
                for place in range(begin, end)
            )
            members.append(BatchedSequence(part.num_tokens, end, pages))
        rows = torch.tensor([tokens, positions, slots]).to(self._device)
        return Step(
            tokens=rows[0],
            positions=rows[1],
            plans=plans(members, self._windows, self._device),
            slots=rows[2],
            cache=self.layers,
        )

    def _clear(self, pages: list[int]) -> None:
        """Zero pages that are written first now.  Reading by whole pages also copies what an
        earlier sequence wrote behind the newest token; masked it does no harm unless it is NaN
        (lost weights, an overflow), which no mask stops."""
        if pages:
            self._all.index_fill_(2, torch.tensor(pages, device=self._device), 0)


def fresh_step(ids: Sequence[int], model: Decoder, device: torch.device) -> Step:
    """A pass over one whole sequence by itself, which leaves nothing in the cache."""
    member = BatchedSequence(len(ids), len(ids))
    return Step(
        tokens=torch.tensor(ids, device=device),
        positions=torch.arange(len(ids), device=device),
        plans=plans([member], set(model.config.windows), device),
    )


def plans(
    members: Sequence[BatchedSequence], windows: set[int | None], device: torch.device
) -> dict[int | None, list[AttentionBucket]]:
    return {window: plan(members, PAGE_SIZE, device, window) for window in windows}
