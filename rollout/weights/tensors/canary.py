"""What the trainer's own model tells of the canary's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def canary_logprobs(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities of each prompt's tokens after the first, for ``ServerHandle.expect``.

    Args:
        model: called with ``[1, tokens]`` ids, as those of transformers are; it returns logits,
            or something that has them.
    """
    told = []
    for prompt in prompts:
        device = next(model.parameters()).device
        tokens = torch.tensor([list(prompt)], device=device)
        with torch.no_grad():
            output = model(tokens)
        logits = getattr(output, "logits", output)[0, :-1].float()
        chosen = logits.gather(1, tokens[0, 1:].unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=-1)
        told.append(chosen.tolist())
    return told
