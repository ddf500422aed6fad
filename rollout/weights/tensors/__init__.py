"""From a trainer's tensors to a push.

The only package of ``rollout/weights`` that imports torch.  It runs in the trainer's process and
emits bytes, files or broadcasts; never tensors in Ray's serializer, which is twenty times slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engines.embedded.weights.torch_fingerprint import bytes_fingerprint, device_fingerprint
from rollout.config import Transport, WeightsConfig
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.shm_buffers import ShmBufferPool
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.tensors.broadcast_sender import KeptGroup, NcclTerms
from rollout.weights.tensors.bucket_writer import CheckpointWriter
from rollout.weights.tensors.copied_weights import CopiedWeights
from rollout.weights.tensors.fp8_quantiser import fp8_block_quantiser
from rollout.weights.tensors.push_plan import Dtype, NameMap, PushPlanCache
from rollout.weights.tensors.sender import OutgoingPush, PushSender
from rollout.weights.tensors.tensor_sources import NamedTensors, TrainerWeights


def make_push(
    named_tensors: NamedTensors,
    *,
    version: int,
    bucket_bytes: int,
    expected: Manifest | None = None,
    name_map: NameMap | None = None,
) -> WeightPush:
    """A push by value of a copy of these tensors, in buckets of about ``bucket_bytes``.

    A tensor whose name the model does not have is omitted if it shares memory with one that the
    model has (a tied ``lm_head.weight`` in a ``state_dict``).

    Args:
        named_tensors: under their checkpoint names, on any device; a DTensor is on one rank.
        expected: the model's manifest, to find tied tensors; None keeps every name.

    Raises:
        WeightMismatch: a value is not a tensor, or a name occurs twice.
    """
    weights = TrainerWeights(
        named_tensors, bucket_bytes=bucket_bytes, expected=expected, name_map=name_map
    )
    sender = PushSender(WeightsConfig(bucket_bytes=bucket_bytes), ShmBufferPool())
    return sender.send(weights, version, Transport.TENSOR, may_stream=False).push


def canary_logprobs(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities of each prompt's tokens after the first, for ``WeightChecks.expect``.

    Args:
        model: called with ids of shape ``[1, tokens]``, as in transformers; returns logits, or an
            object with ``logits``.
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
    "CheckpointWriter",
    "CopiedWeights",
    "Dtype",
    "KeptGroup",
    "NameMap",
    "NamedTensors",
    "NcclTerms",
    "OutgoingPush",
    "PushPlanCache",
    "PushSender",
    "TrainerWeights",
    "bytes_fingerprint",
    "canary_logprobs",
    "device_fingerprint",
    "fp8_block_quantiser",
    "make_push",
]
