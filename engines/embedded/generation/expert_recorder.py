"""Which experts a mixture's routers choose for each token, kept for the requests that want them.

Always true: a generation has one row for each token that was computed for it, in order, and keeps
the first one where a token is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.embedded.generation.scheduler import Part


def record_experts(parts: Sequence[Part], chosen: Sequence[torch.Tensor]) -> None:
    """Add a step's rows to the generations; call before their tokens count as cached.

    Args:
        chosen: of each layer with experts, ``[tokens, experts]``.
    """
    rows = torch.stack(list(chosen), dim=1).to(torch.int32).cpu()  # [tokens, layers, experts]
    start = 0
    for part in parts:
        end = start + part.num_tokens
        generation = part.sequence.generation
        if generation.wants_experts:
            # Tokens that left the cache are computed again.
            num_recorded = len(generation.routed_experts) - part.sequence.num_cached
            new = rows[min(start + num_recorded, end) : end]
            generation.routed_experts += [row.tobytes() for row in new.numpy()]
        start = end
