"""The tensor side of a push: from a trainer's tensors to buckets on their way.

The only package of ``rollout/weights`` that imports torch.  It runs in the trainer's process;
what leaves it is bytes, files or a broadcast, never tensors in Ray's serializer, which is twenty
times slower.
"""

from __future__ import annotations

from engines.embedded.fingerprint import bytes_fingerprint, device_fingerprint
from rollout.config import Transport, WeightsConfig
from rollout.weights.manifest import Manifest
from rollout.weights.push import WeightPush
from rollout.weights.slots import SlotPool
from rollout.weights.tensors.broadcasting import KeptGroup
from rollout.weights.tensors.canary import canary_logprobs
from rollout.weights.tensors.planning import NameMap, Plans
from rollout.weights.tensors.sending import Outgoing, Sender
from rollout.weights.tensors.sources import NamedTensors, Weights, take_part


def make_push(
    named_tensors: NamedTensors,
    *,
    version: int,
    bucket_bytes: int,
    expected: Manifest | None = None,
    name_map: NameMap | None = None,
) -> WeightPush:
    """A push by value of a copy of these tensors, in buckets of about ``bucket_bytes``.

    A tensor under a name the model does not have is left out when it is the same memory as one
    it does have (a tied ``lm_head.weight`` in a ``state_dict``).

    Args:
        named_tensors: under their checkpoint names, on any device; DTensors are gathered.
        expected: the model's manifest, to recognise tied tensors; None keeps every name.

    Raises:
        WeightMismatch: a value is not a tensor, or a name occurs twice.
    """
    weights = Weights(
        named_tensors, bucket_bytes=bucket_bytes, expected=expected, name_map=name_map
    )
    sender = Sender(WeightsConfig(bucket_bytes=bucket_bytes), SlotPool())
    return sender.send(weights, version, Transport.TENSOR, may_stream=False).push


__all__ = [
    "KeptGroup",
    "NameMap",
    "NamedTensors",
    "Outgoing",
    "Plans",
    "Sender",
    "Weights",
    "bytes_fingerprint",
    "canary_logprobs",
    "device_fingerprint",
    "make_push",
    "take_part",
]
