"""Whether an attached or started engine has what its group needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.protocol import ModelInfo, ServerInfo
from engines.protocol.features import Features
from engines.protocol.spec import spelled
from rollout.config import Drain, GroupConfig, Transport, WeightUpdate


def why_incompatible(
    features: Features,
    group: GroupConfig,
    update: WeightUpdate,
    drain: Drain,
    *,
    memory_saver: bool,
    weights_cpu_backup: bool,
    transport: Transport = Transport.AUTO,
) -> str:
    """Why an engine cannot be part of a group, and which setting fixes that; empty if it can.

    Args:
        memory_saver: the group releases its memory.
        weights_cpu_backup: its weights must survive a release.
        transport: how pushes reach it.

    Returns:
        The end of a message that begins with the path of the group's settings.  It contains
        ``{engine}`` for the engine's name.
    """
    if features.undrivable:
        return f".engine: engine {{engine}}: {features.undrivable}"
    if memory_saver and not features.has_memory_saver:
        return (
            ".needs_offload: engine {engine} runs without a memory saver, so a release would free "
            "no memory; start it with --enable-memory-saver, or set needs_offload to false"
        )
    if weights_cpu_backup and not features.has_weights_cpu_backup:
        return (
            ".engine.weights_cpu_backup: engine {engine} keeps no copy of its weights while they "
            "are released, and not all of them are pushed; start it with "
            "--enable-weights-cpu-backup, or set needs_offload to false"
        )
    if drain is Drain.RETRACT and not features.is_retract_safe:
        return (
            f".engine: engine {{engine}}: {features.engine} {features.version} crashes when "
            "memory is released while requests are retracted; set lifecycle.drain to abort "
            "or finish, or use SGLang 0.5.21 or later"
        )
    if features.worker_type is not group.worker_type:
        return (
            f".worker_type = {group.worker_type}: engine {{engine}} is a {features.worker_type} "
            "worker; put it in a group of its own type"
        )
    if update is not WeightUpdate.FROZEN and features.why_no_pushes:
        return (
            f".engine: engine {{engine}}: {features.why_no_pushes}; or freeze the model "
            "(weights.update: frozen)"
        )
    if update is not WeightUpdate.FROZEN and not features.takes_tensors:
        return (
            ".engine: engine {engine} has data-parallel replicas, which refuse pushed weights; "
            "start one engine per replica, or freeze the model (weights.update: frozen)"
        )
    why_not_taken = {
        Transport.DISTRIBUTED: features.why_no_groups,
        Transport.CUDA_IPC: features.why_no_handles,
    }.get(transport, "")
    if update is not WeightUpdate.FROZEN and why_not_taken:
        return (
            f".engine: weights.transport = {transport} does not reach engine {{engine}}: "
            f"{why_not_taken}; use shared_memory, tensor or disk, or leave weights.transport out"
        )
    if not features.streams_are_cumulative:
        return (
            ".engine: engine {engine} streams only new tokens; start it without "
            "--incremental-streaming-output"
        )
    return ""


def why_embeddings_outlive_pushes(
    model: ModelInfo, info: ServerInfo, encoder: str, variable: str
) -> str:
    """Why an engine that somebody else launched would answer from embeddings that were
    computed before a push; empty if it would not.

    Args:
        encoder: what pushes may change that computes embeddings, in words; empty if nothing.
        variable: of the environment, that switches its cache of them off.

    Returns:
        The end of a message, as of ``why_incompatible``.
    """
    kinds = [kind for kind in ("image", "audio") if model.raw.get(f"has_{kind}_understanding")]
    # With this option SGLang keeps none.
    if not encoder or not kinds or info.raw.get("rl_on_policy_target") is not None:
        return ""
    return (
        f".engine: engine {{engine}} understands {' and '.join(kinds)} input and keeps the "
        f"embeddings that it computed; after a push that changes {encoder} it would go on with old "
        f"ones. Start it with {variable}=0, and say so in engine.env "
        f'({variable}: "0"); or name those tensors in weights.not_pushed'
    )


def why_quantised_online(
    options: Mapping[str, Any], update: WeightUpdate, *, is_quantised: bool
) -> str:
    """Why an SGLang engine that quantises its checkpoint at start cannot take pushes; empty if it
    can, or does not.

    Args:
        is_quantised: the checkpoint on disk is quantised already.
    """
    named = {spelled(name): value for name, value in options.items()}
    method = named.get("quantization")
    if method in (None, "none", "unquant") or is_quantised:
        return ""
    if update not in (WeightUpdate.FULL, WeightUpdate.PARTIAL):
        return ""
    if named.get("load_format") == "flash_rl":
        return ""
    return (
        "the checkpoint is not quantised, so SGLang quantises it at start, and the first push "
        "would end the engine; use a checkpoint in fp8 and push with "
        "rollout.weights.tensors.fp8_block_quantiser, or leave quantization out (with load-format "
        "flash_rl it is accepted, and not tested)"
    )
