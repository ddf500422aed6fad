"""What an engine and a trainer take of a GPU, computed from the sizes of the model.

Always true: nothing is measured.  Left out are activations, CUDA contexts, CUDA graphs and what an
allocator keeps, so each free figure is what these must fit into.

The formulas, for bytes on one GPU:

- weights: elements of each part of the model, divided over the GPUs that share it (``Shards``),
  times the bytes of an element; layers over pipeline stages, rounded up;
- a token of KV cache: 2 x layers x KV heads x elements of a head x bytes of an element.  A GPU has
  one KV head at least;
- the KV cache: what the engine's share of the GPU leaves beside the weights.  SGLang 0.5.23
  (``KVCacheConfigurator._profile_available_bytes``) takes its share of what is free at its start,
  vLLM 0.32 (``request_memory``) of the whole GPU and subtracts the activations that it profiles;
- the trainer: FSDP2 divides parameters, gradients and Adam's two moments over all its GPUs, in
  float32 with ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``: 16 bytes for a parameter, and
  12 after ``zero_grad``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from engines.protocol.kind import Shards

FSDP2_STEP_BYTES = 16
"""For each parameter in a step: itself, its gradient, Adam's two moments, in float32."""
FSDP2_REST_BYTES = 12
"""For each parameter between steps: the same without its gradient."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Elements of a language model's parts.

    Attributes:
        head: 0 if the embedding is the head.
        attention: projections, norms and router of a layer.
        dense: the feed-forward block of a layer without experts, else 0.
        experts: all experts of a layer.
        kv_heads: of a layer.
        head_size: elements of a head.
    """

    num_layers: int
    embedding: int
    head: int
    attention: int
    dense: int
    experts: int
    kv_heads: int
    head_size: int

    @property
    def num_elements(self) -> int:
        """All of the model's, but for a norm at its end."""
        layer = self.attention + self.dense + self.experts
        return self.embedding + self.head + self.num_layers * layer


@dataclass(frozen=True, slots=True)
class EngineSums:
    """Bytes on each GPU of an engine.

    Attributes:
        static_bytes: its share of the GPU, for weights and KV cache.
        kv_tokens: in the KV caches of the whole engine; 0 if the weights do not fit.
    """

    weights_bytes: int
    static_bytes: int
    kv_token_bytes: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class TrainerSums:
    """Bytes on each GPU of a trainer.

    Attributes:
        step_bytes: from the backward pass to ``zero_grad``.
        rest_bytes: between steps.
    """

    step_bytes: int = 0
    rest_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FreeBytes:
    """Bytes of a GPU that nothing takes, in each part of a step; negative if it does not fit.

    Attributes:
        serving: beside a serving engine and a trainer at rest.
        training: beside a trainer in its step, while the engine has released its memory.
        pushing: beside the weights, a trainer at rest and the buckets of a push; the KV cache is
            resumed after it.
    """

    serving: int
    training: int
    pushing: int


def engine_sums(
    parts: ModelParts,
    shards: Shards,
    *,
    gpu_bytes: int,
    gpu_share: float,
    element_bytes: int,
    kv_element_bytes: int,
) -> EngineSums:
    """Weights and KV cache on each GPU of an engine.

    Args:
        gpu_share: the share of a GPU that weights and KV cache may take.
    """
    num_layers = ceil(parts.num_layers / shards.pipeline)
    ends = [parts.embedding / shards.attention, parts.head / shards.dense]
    layer = (
        parts.attention / shards.attention
        + parts.dense / shards.dense
        + parts.experts / shards.experts
    )
    # The first stage has the embedding, the last one the head.
    elements = num_layers * layer + (max(ends) if shards.pipeline > 1 else sum(ends))
    weights_bytes = ceil(elements * element_bytes)
    kv_heads = ceil(parts.kv_heads / shards.attention)
    kv_token_bytes = 2 * num_layers * kv_heads * parts.head_size * kv_element_bytes
    static_bytes = int(gpu_bytes * gpu_share)
    kv_tokens = max(0, static_bytes - weights_bytes) // kv_token_bytes * shards.pools
    return EngineSums(weights_bytes, static_bytes, kv_token_bytes, kv_tokens)


def fsdp2_sums(num_elements: int, num_gpus: int) -> TrainerSums:
    """A trainer with FSDP2 that has all of the model on these GPUs."""
    return TrainerSums(
        ceil(num_elements * FSDP2_STEP_BYTES / num_gpus),
        ceil(num_elements * FSDP2_REST_BYTES / num_gpus),
    )


def free_bytes(
    gpu_bytes: int, engine: EngineSums, trainer: TrainerSums, push_bytes: int
) -> FreeBytes:
    """What engine and trainer leave of the GPU that they share.

    Args:
        push_bytes: of the buckets on this GPU, both the trainer's and the engine's.
    """
    return FreeBytes(
        serving=gpu_bytes - engine.static_bytes - trainer.rest_bytes,
        training=gpu_bytes - trainer.step_bytes,
        pushing=gpu_bytes - engine.weights_bytes - trainer.rest_bytes - push_bytes,
    )
