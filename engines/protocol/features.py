"""Features of an engine, read from its replies, and whether we can drive it.

Plain functions over the replies of ``/server_info`` and ``/openapi.json``.  What is true of all
versions of a kind, with any flags, is in ``kinds``.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from engines.protocol import ServerInfo, WorkerType
from engines.protocol.kind import Kind


@dataclass(frozen=True, slots=True)
class Features:
    """Features of one engine.

    Attributes:
        has_weight_session: weights are updated between begin and end, and only there.
        is_retract_safe: it may be flushed and released while requests are retracted.
        recomputes_experts: it reports the routed experts of a retracted request as the new weights
            choose them, for its old tokens too.
        has_memory_saver: release really frees; without one SGLang returns 200 and frees nothing.
        has_weights_cpu_backup: weights are bit-equal after a release and resume.
        num_payloads: copies of a tensor payload it wants, one per tensor-parallel rank.
        takes_tensors: weights can be pushed as tensors; data-parallel replicas refuse them.
        streams_are_cumulative: each event of a stream holds all tokens so far.
        moves_experts: it places its experts by their load (EPLB), other than other engines do.
        undrivable: why this library cannot drive it, or empty if it can.
        why_no_pushes: why pushed weights cannot reach it.
        draft: what drafts its tokens and has weights, or empty if nothing does.
        draft_backup: the option with which it keeps a copy of the draft's weights over a release,
            or empty for none.
        why_draft_lost: why a release without a copy of all weights loses those of its draft, and
            what would keep them.
        why_no_groups: why it joins no broadcast groups.
        why_no_handles: why it takes no CUDA IPC handles.
        encodings: of tensors, that it applies besides whole ones.
    """

    engine: str
    version: str
    worker_type: WorkerType
    has_weight_session: bool
    is_retract_safe: bool
    has_memory_saver: bool
    has_weights_cpu_backup: bool
    num_payloads: int
    takes_tensors: bool
    streams_are_cumulative: bool
    moves_experts: bool
    undrivable: str
    recomputes_experts: bool = False
    why_no_pushes: str = ""
    draft: str = ""
    draft_backup: str = ""
    why_draft_lost: str = ""
    why_no_groups: str = ""
    why_no_handles: str = ""
    encodings: tuple[str, ...] = ()


def read_features(info: ServerInfo, paths: Set[str], kind: Kind | None) -> Features:
    """The features of the engine that gave these replies.

    Args:
        paths: endpoints it serves.
        kind: that of its name, or None if there is none.
    """
    raw = info.raw
    return Features(
        engine=info.engine,
        version=info.version,
        worker_type=_worker_type(raw.get("disaggregation_mode"), bool(raw.get("encoder_only"))),
        has_weight_session="/begin_weight_update" in paths,
        is_retract_safe=kind is None or kind.is_retract_safe(info.version),
        # Under Ray SGLang starts its schedulers without the memory saver's library.
        recomputes_experts=bool(kind and raw.get(kind.experts_option)),
        has_memory_saver=info.enable_memory_saver and not raw.get("use_ray"),
        has_weights_cpu_backup=info.enable_weights_cpu_backup,
        num_payloads=int(raw.get("tp_size") or 1),
        takes_tensors=int(raw.get("dp_size") or 1) == 1,
        streams_are_cumulative=not raw.get("incremental_streaming_output"),
        moves_experts=bool(raw.get("enable_eplb")),
        undrivable=kind.why_undrivable(info.version, paths)
        if kind
        else f"engine {info.engine!r} is of no known kind",
        why_no_pushes=info.why_no_pushes,
        draft=kind.draft(raw) if kind else "",
        draft_backup=_draft_backup(info, kind) if kind else "",
        why_draft_lost=_why_draft_lost(info, kind) if kind else "",
        why_no_groups=info.why_no_groups or _why_no_groups(int(raw.get("pp_size") or 1)),
        why_no_handles=info.why_no_handles,
        encodings=tuple(raw.get("encodings") or ()),
    )


def _draft_backup(info: ServerInfo, kind: Kind) -> str:
    """Where only a copy of all weights keeps the draft's, its group decides about that one."""
    option = kind.draft_backup_option
    if option and info.raw.get(option):
        return option.replace("_", "-")
    return "enable-weights-cpu-backup" if option and info.enable_weights_cpu_backup else ""


def _why_draft_lost(info: ServerInfo, kind: Kind) -> str:
    draft, option = kind.draft(info.raw), kind.draft_backup_option
    if not draft or _draft_backup(info, kind):
        return ""
    flag = f"start it with --{option.replace('_', '-')}"
    return (
        f"no push contains its draft {draft}, and a release would leave no copy of the draft's "
        f"weights; {flag if option else 'set engine.weights_cpu_backup to true'}"
    )


def _why_no_groups(num_stages: int) -> str:
    if num_stages == 1:
        return ""
    return (
        f"it has {num_stages} pipeline stages, whose ranks cannot all be in a broadcast (start it "
        "with one)"
    )


def _worker_type(mode: object, is_encoder: bool) -> WorkerType:
    if is_encoder:
        return WorkerType.ENCODER
    return WorkerType(mode) if mode in ("prefill", "decode") else WorkerType.REGULAR
