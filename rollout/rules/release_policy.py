"""What a group releases, and from where its weights are restored.

Always true: all released weights are restored before the group serves again.  A configuration in
which they cannot be is refused at start, with the setting that fixes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.protocol import MemoryTag
from engines.protocol.kind import Kind
from rollout.config import GroupConfig, WeightUpdate
from rollout.core.errors import ConfigError
from rollout.rules.lifecycle import GroupTraits


@dataclass(frozen=True, slots=True)
class ReleasePolicy:
    """The release policy of one group.

    Attributes:
        tags: the memory that is released, or empty for a group that keeps its GPUs.
        weights_cpu_backup: the engine keeps a host copy of its weights while they are released.
        weights_from: from where the weights are restored, as ``rollout plan`` prints it.
    """

    tags: tuple[MemoryTag, ...]
    weights_cpu_backup: bool
    weights_from: str


# The weights that a push of this kind does not contain, so they must survive a release.
_NOT_PUSHED = {
    WeightUpdate.PARTIAL: "the tensors that are not pushed",
    WeightUpdate.LORA: "the base weights under the adapter",
    WeightUpdate.FROZEN: "all weights",
}
_ALL_TAGS = (MemoryTag.KV_CACHE, MemoryTag.WEIGHTS, MemoryTag.CUDA_GRAPH)


def release_policy(
    name: str, group: GroupConfig, update: WeightUpdate, not_pushed: Sequence[str] = ()
) -> ReleasePolicy:
    """The release policy of one group.

    Args:
        name: dotted path of the group's settings, for the message.
        not_pushed: patterns of tensors that a full push does not contain.

    Raises:
        ConfigError: the group would release weights that cannot be restored.
    """
    backup = group.engine.weights_cpu_backup
    if not group.needs_offload:
        return ReleasePolicy((), False, "never released")
    lost, by = _NOT_PUSHED.get(update), ""
    if not_pushed and lost is None:
        lost = f"the tensors of weights.not_pushed ({', '.join(not_pushed)})"
    if lost is None and (draft := _draft_without_backup(group)):
        lost, by = f"the draft {draft}", f" (no push contains the draft {draft})"
    if lost is None:
        source = "CPU backup, then the push" if backup else "the push (all tensors)"
        return ReleasePolicy(_ALL_TAGS, bool(backup), source)
    if backup is False:
        setting = f"{name}.engine.weights_cpu_backup"
        raise ConfigError(
            f"{setting} = False: with weights.update = {update}, {lost} would be "
            "corrupt after an offload; set weights_cpu_backup to true (or leave it out), or "
            "needs_offload to false",
            setting=setting,
            value=False,
        )
    source = "CPU backup" if update is WeightUpdate.FROZEN else f"CPU backup{by}, then the push"
    return ReleasePolicy(_ALL_TAGS, True, source)


def _draft_without_backup(group: GroupConfig) -> str:
    """The draft whose weights only a copy of all weights keeps, or empty if there is none."""
    kind = group.engine.of_kind
    return "" if kind.draft_backup_option else kind.draft(group.engine.options)


def draft_note(group: GroupConfig, update: WeightUpdate, *, has_backup: bool) -> str:
    """The draft of engines that are launched: what keeps its weights, and what becomes of it, or
    empty without one.

    Args:
        has_backup: an engine keeps a copy of all weights over a release.
    """
    kind = group.engine.of_kind
    own, whole = kind.draft_backup_option.replace("_", "-"), "weights_cpu_backup" * has_backup
    backup = own or whole if group.needs_offload else None
    return draft_text(kind, kind.draft(group.engine.options), update, backup)


def draft_text(kind: Kind, draft: str, update: WeightUpdate, backup: str | None) -> str:
    """What keeps the weights of a draft, and what becomes of it, or empty for none.

    Args:
        draft: as in ``Features``.
        backup: the option with which the engine keeps a copy of them over a release, or None if it
            is never released.
    """
    if not draft:
        return ""
    if backup is None:
        kept = "its weights are never released"
    elif backup:
        kept = f"over an offload its weights are kept by {backup}"
    else:
        kept = "an offload loses its weights"
    if update is WeightUpdate.FROZEN:
        drifts = "nothing is pushed, so it fits the model as it does at the start"
    else:
        reached = (
            f"{kind.title} loads into it only those pushed tensors whose names it has"
            if kind.pushes_reach_draft
            else "no push contains it"
        )
        drifts = (
            f"{reached}, so it drifts from the policy: accepted drafts fall with training (metric "
            "rollout_engine_draft_accepted_ratio)"
        )
    return f"draft {draft}: {kept}; {drifts}"


_ELASTIC_BACKUP = "enable-elastic-expert-backup"


def elastic_backup_note(name: str, group: GroupConfig, update: WeightUpdate) -> str:
    """A warning about SGLang's expert backup, or empty if the group does not use it."""
    options = {
        key.lstrip("-").replace("_", "-"): value for key, value in group.engine.options.items()
    }
    if options.get(_ELASTIC_BACKUP) in (None, False) or update is WeightUpdate.FROZEN:
        return ""
    return (
        f"{name}.engine.options.{_ELASTIC_BACKUP}: SGLang backs up the experts of the checkpoint "
        "on disk once; after the first push it would restore old experts into the new model. "
        "Use weights.store instead, which keeps the pushed weights"
    )


# The measured memory of a process is not exact: allocators keep pages, caches grow and shrink.
_SLACK_BYTES = 32 * 1024 * 1024
_SHARE_OF_REPORTED = 0.8
_SHARE_OF_CHECKPOINT = 0.5


def least_freed_bytes(
    tags: Sequence[MemoryTag], resident_bytes: Mapping[str, int], checkpoint_bytes: int
) -> int:
    """Bytes that a release of ``tags`` must free at least.

    Args:
        resident_bytes: bytes per tag, as the engine reported just before.  What SGLang reports of
            its weights includes what others took on the GPU while it loaded them.
        checkpoint_bytes: bytes of the weights on disk, 0 if unknown.  Of an engine that reports
            nothing half of it must be freed: it may hold the weights in a smaller type.
    """
    if resident_bytes:
        reported = {tag: resident_bytes.get(tag, 0) for tag in tags}
        if checkpoint_bytes and MemoryTag.WEIGHTS in reported:
            reported[MemoryTag.WEIGHTS] = min(reported[MemoryTag.WEIGHTS], checkpoint_bytes)
        expected = _SHARE_OF_REPORTED * sum(reported.values())
    else:
        expected = _SHARE_OF_CHECKPOINT * checkpoint_bytes if MemoryTag.WEIGHTS in tags else 0.0
    return max(0, int(expected) - _SLACK_BYTES)


def bytes_to_resume(
    reported: Mapping[MemoryTag, int], freed_bytes: int | None, checkpoint_bytes: int
) -> dict[MemoryTag, int]:
    """Bytes that each released tag takes when it is resumed.

    Where less was freed than the engine had reported, it had counted others' memory with its
    weights; those take at least what the checkpoint has.

    Args:
        reported: as the engine reported before the release.
        freed_bytes: by the release of all these tags, or None if not measured.
    """
    found = dict(reported)
    too_much = 0 if freed_bytes is None else sum(reported.values()) - freed_bytes
    if too_much > 0 and MemoryTag.WEIGHTS in found:
        weights = found[MemoryTag.WEIGHTS]
        found[MemoryTag.WEIGHTS] = max(weights - too_much, min(weights, checkpoint_bytes))
    return found


def group_traits(
    name: str, group: GroupConfig, update: WeightUpdate, not_pushed: Sequence[str] = ()
) -> GroupTraits:
    """The properties of a group that decide which commands it gets.

    Raises:
        ConfigError: as in ``release_policy``.
    """
    policy = release_policy(name, group, update, not_pushed)
    return GroupTraits(
        needs_offload=group.needs_offload,
        is_frozen=update is WeightUpdate.FROZEN,
        weights_survive=policy.weights_cpu_backup or not group.needs_offload,
    )
