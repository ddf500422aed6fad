"""Which experts a mixture's routers choose for each token, kept for the requests that want them.

Always true: a generation has one row for each token that was computed for it, in order, and keeps
the first one where a token is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import FutureRequestState

_ROUTERS = "TopKRouter"
"""How transformers ends the names of routers that return logits, weights and choices."""


class ExpertRecorder:
    """Listens to the routers of one model.

    Attributes:
        num_layers: layers with experts; 0 where the model has none, or other routers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        routers = [one for one in model.modules() if type(one).__name__.endswith(_ROUTERS)]
        self.num_layers = len(routers)
        self._is_on = False
        self._chosen: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(self._listen)

    def begin(self, batch: Sequence[FutureRequestState]) -> None:
        """Call before a step over ``batch``."""
        self._is_on = any(_generation_of(request).wants_experts for request in batch)
        self._chosen = []

    def end(self, batch: Sequence[FutureRequestState]) -> None:
        """Call after the step, before the batch's requests get their tokens."""
        if not self._is_on:
            return
        self._is_on = False
        rows = torch.stack(self._chosen, dim=1).to(torch.int32).cpu()  # [tokens, layers, experts]
        start = 0
        for request in batch:
            num = request.query_length
            generation = _generation_of(request)
            if generation.wants_experts:
                # Tokens that left the cache are computed again.
                num_known = len(generation.routed_experts) - request.state.position_offset + num
                new = rows[start + min(num_known, num) : start + num]
                generation.routed_experts += [row.tobytes() for row in new.numpy()]
            start += num

    def _listen(self, router: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._is_on:
            self._chosen.append(output[2])


def _generation_of(request: FutureRequestState) -> Any:
    return request.state.generation  # type: ignore[attr-defined]
