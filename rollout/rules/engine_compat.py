"""Whether an attached or started engine has what its group needs."""

from __future__ import annotations

from engines.protocol.features import Features
from rollout.config import Drain, GroupConfig, WeightUpdate


def why_incompatible(
    features: Features,
    group: GroupConfig,
    update: WeightUpdate,
    drain: Drain,
    *,
    memory_saver: bool,
    weights_cpu_backup: bool,
) -> str:
    """Why an engine cannot be part of a group, and which setting fixes that; empty if it can.

    Args:
        memory_saver: the group releases its memory.
        weights_cpu_backup: its weights must survive a release.

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
    if update is not WeightUpdate.FROZEN and not features.takes_tensors:
        return (
            ".engine: engine {engine} has data-parallel replicas, which refuse pushed weights; "
            "start one engine per replica, or freeze the model (weights.update: frozen)"
        )
    if not features.streams_are_cumulative:
        return (
            ".engine: engine {engine} streams only new tokens; start it without "
            "--incremental-streaming-output"
        )
    return ""
