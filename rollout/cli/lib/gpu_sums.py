"""The memory sums of each group's GPUs, as ``rollout plan`` shows them: computed, not measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engines.process.gpu_memory import memory_of_all_gpus
from engines.protocol.plain_text import size_text
from engines.protocol.spec import spelled
from rollout.config import EngineConfig, GroupConfig, ServerConfig, WeightUpdate
from rollout.rules.gpu_memory import (
    EngineSums,
    FreeBytes,
    ModelParts,
    TrainerSums,
    engine_sums,
    free_bytes,
    fsdp2_sums,
)
from rollout.weights.format.checkpoint_config import (
    element_bytes_of,
    parts_of,
    quantisation_of,
    read_checkpoint_config,
)
from rollout.weights.push.push_memory import PushMemory

_GIB = 1 << 30
_H100_BYTES = int(79.1 * _GIB)
"""What CUDA reports of an H100 with 80 GB."""
_KV_DTYPE = "kv_cache_dtype"


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """The GPU that sums are computed for.

    Attributes:
        source: where its size is known from.
    """

    num_bytes: int
    source: str


def planned_gpu(gpu_gib: float | None) -> PlannedGpu:
    """A GPU of this size; by default the smallest of this machine, or else an H100."""
    if gpu_gib is not None:
        return PlannedGpu(int(gpu_gib * _GIB), "--gpu-gib")
    measured, _ = memory_of_all_gpus()
    if measured:
        return PlannedGpu(min(gpu.total_bytes for gpu in measured), "the smallest of this machine")
    return PlannedGpu(_H100_BYTES, "an H100 80 GB, as no GPU is seen here; --gpu-gib gives another")


def gpu_sums(
    server: ServerConfig,
    group: GroupConfig,
    trainer_gpus: int,
    gpu: PlannedGpu,
    push_memory: list[PushMemory],
) -> dict[str, Any] | None:
    """Weights, KV cache, trainer and what they leave on each GPU of a group, ready for JSON.

    None for engines without GPUs or that run already, and for a model or sizes that are not known.
    """
    engine = group.engine
    config = read_checkpoint_config(server.model_path)
    parts = None if quantisation_of(config) else parts_of(config)
    if parts is None or not engine.gpus or engine.is_attached:
        return None
    engine_part = _engine_sums(engine, parts, element_bytes_of(config), gpu)
    if engine_part is None:
        return None
    # Only a push in full shows that the trainer has the same model, with all of it in training.
    is_shared = group.needs_offload and server.weights.update is WeightUpdate.FULL
    num_gpus = trainer_gpus if is_shared else 0
    trainer = fsdp2_sums(parts.num_elements, num_gpus) if num_gpus else TrainerSums()
    # The first route is the one that AUTO takes on GPUs of one host.
    peaks = push_memory[:1] if num_gpus else []
    push_bytes = sum(peak.trainer_bytes + peak.engine_bytes for peak in peaks)
    return {
        "gpu_bytes": gpu.num_bytes,
        "gpu_source": gpu.source,
        "trainer_gpus": num_gpus,
        "engine": asdict(engine_part),
        "trainer": asdict(trainer),
        "push_bytes": push_bytes,
        "free": asdict(free_bytes(gpu.num_bytes, engine_part, trainer, push_bytes)),
    }


def _engine_sums(
    engine: EngineConfig, parts: ModelParts, element_bytes: int, gpu: PlannedGpu
) -> EngineSums | None:
    kind = engine.of_kind
    options = {spelled(name): value for name, value in engine.options.items()}
    shards = kind.shards(engine.options, engine.gpus)
    option, default = kind.gpu_share
    share = options.get(option, default)
    if shards is None or not isinstance(share, float):
        return None
    is_fp8 = str(options.get(_KV_DTYPE, "auto")).startswith("fp8")
    return engine_sums(
        parts,
        shards,
        gpu_bytes=gpu.num_bytes,
        gpu_share=share,
        element_bytes=element_bytes,
        kv_element_bytes=1 if is_fp8 else element_bytes,
    )


def gpu_lines(sums: Mapping[str, Any]) -> Iterator[str]:
    """The sums of one group as lines of a plan."""
    engine, trainer = EngineSums(**sums["engine"]), TrainerSums(**sums["trainer"])
    free, num_gpus = FreeBytes(**sums["free"]), sums["trainer_gpus"]
    yield f"a GPU: {size_text(sums['gpu_bytes'])} ({sums['gpu_source']})"
    yield (
        f"an engine's share {size_text(engine.static_bytes)}: weights "
        f"{size_text(engine.weights_bytes)}, then KV cache, {size_text(engine.kv_token_bytes)} a "
        f"token; {engine.kv_tokens} tokens fit into an engine"
    )
    if num_gpus:
        yield (
            f"a trainer with FSDP2 on {num_gpus} GPUs: {size_text(trainer.step_bytes)} in its "
            f"step, {size_text(trainer.rest_bytes)} between steps"
        )
        yield (
            f"free: {_room(free.serving)} while engines serve, {_room(free.training)} in the "
            f"trainer's step, {_room(free.pushing)} in a push"
        )
    else:
        yield f"free: {_room(free.serving)} beside a serving engine"


def _room(num_bytes: int) -> str:
    return size_text(num_bytes) if num_bytes >= 0 else f"{size_text(-num_bytes)} TOO LITTLE"
