"""From a trainer's tensors to a push.

It runs in the trainer's process and emits bytes, files or broadcasts; never tensors in Ray's
serializer, which is twenty times slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engines.tensors.torch_fingerprint import bytes_fingerprint, device_fingerprint
from rollout.weights.tensors.fp8_quantiser import fp8_block_quantiser
from rollout.weights.tensors.push_plan import Dtype, NameMap, PushPlanCache
from rollout.weights.tensors.sources import NamedTensors, PlannedSource


def canary_logprobs(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities of each prompt's tokens after the first, for ``WeightChecks.expect``.

    Args:
        model: called with ids of shape ``[1, tokens]``, as in transformers; returns logits, or an
            object with ``logits``.
        prompts: token ids, such as ``policy.checks.canary_prompts``.
    """
    logprobs = []
    for prompt in prompts:
        device = next(model.parameters()).device
        tokens = torch.tensor([list(prompt)], device=device)
        with torch.no_grad():
            output = model(tokens)
        logits = getattr(output, "logits", output)[0, :-1].float()
        chosen = logits.gather(1, tokens[0, 1:].unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=-1)
        logprobs.append(chosen.tolist())
    return logprobs


__all__ = [
    "Dtype",
    "NameMap",
    "NamedTensors",
    "PlannedSource",
    "PushPlanCache",
    "bytes_fingerprint",
    "canary_logprobs",
    "device_fingerprint",
    "fp8_block_quantiser",
]
