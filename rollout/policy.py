"""What a group may forget when it releases memory, and where it comes back from.

Always true: for every released byte there is a source it comes back from before the group
serves again; a configuration without one is refused at start-up with the setting that mends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.protocol import MemoryTag
from rollout.config import GroupConfig, WeightUpdate
from rollout.errors import ConfigError
from rollout.lifecycle import Traits


@dataclass(frozen=True, slots=True)
class ReleasePolicy:
    """The decision for one group.

    Attributes:
        tags: what is released; empty for a group that keeps its GPUs.
        weights_cpu_backup: the engine keeps a host copy of its weights while released.
        weights_from: where the weights come back from, in words for ``rollout plan``.
    """

    tags: tuple[MemoryTag, ...]
    weights_cpu_backup: bool
    weights_from: str


# What of the weights a push of this kind does not bring, and so must survive a release.
_NOT_PUSHED = {
    WeightUpdate.PARTIAL: "the tensors that are not pushed",
    WeightUpdate.LORA: "the base weights under the adapter",
    WeightUpdate.FROZEN: "all weights",
}
_ALL_TAGS = (MemoryTag.KV_CACHE, MemoryTag.WEIGHTS, MemoryTag.CUDA_GRAPH)


def release_policy(name: str, group: GroupConfig, update: WeightUpdate) -> ReleasePolicy:
    """The release policy of one group.

    Args:
        name: dotted path of the group's settings, for the message.

    Raises:
        ConfigError: the group would lose weights that nothing brings back.
    """
    backup = group.engine.weights_cpu_backup
    if not group.needs_offload:
        return ReleasePolicy((), False, "never released")
    lost = _NOT_PUSHED.get(update)
    if lost is None:
        source = "CPU backup, then the push" if backup else "the push (all tensors)"
        return ReleasePolicy(_ALL_TAGS, bool(backup), source)
    if backup is False:
        setting = f"{name}.engine.weights_cpu_backup"
        raise ConfigError(
            f"{setting} = False: with weights.update = {update}, {lost} would come back as "
            "garbage after an offload; set weights_cpu_backup to true (or leave it out), or "
            "needs_offload to false",
            setting=setting,
            value=False,
        )
    source = "CPU backup" if update is WeightUpdate.FROZEN else "CPU backup, then the push"
    return ReleasePolicy(_ALL_TAGS, True, source)


_ELASTIC_BACKUP = "enable-elastic-expert-backup"


def elastic_backup_note(name: str, group: GroupConfig, update: WeightUpdate) -> str:
    """What to know of SGLang's own expert backup, if the group has it; empty if it has not."""
    options = {
        key.lstrip("-").replace("_", "-"): value for key, value in group.engine.options.items()
    }
    if options.get(_ELASTIC_BACKUP) in (None, False) or update is WeightUpdate.FROZEN:
        return ""
    return (
        f"{name}.engine.options.{_ELASTIC_BACKUP}: SGLang backs up the experts of the checkpoint "
        "on disk, once; after the first push it would bring back old experts into the new model. "
        "weights.store keeps what was pushed"
    )


# Memory of a process is never exact: allocators keep pages, caches come and go.
_SLACK_BYTES = 32 * 1024 * 1024
_SHARE_OF_REPORTED = 0.8
_SHARE_OF_CHECKPOINT = 0.5


def least_freed_bytes(
    tags: Sequence[MemoryTag], resident_bytes: Mapping[str, int], checkpoint_bytes: int
) -> int:
    """What a release of ``tags`` must free at the least, before the trainer may have the memory.

    Args:
        resident_bytes: memory per tag, as the engine itself said just before; it is believed.
        checkpoint_bytes: size of the weights on disk, for engines that say nothing; half of it
            is asked for, since the engine may hold them in a smaller type.
    """
    if resident_bytes:
        expected = _SHARE_OF_REPORTED * sum(resident_bytes.get(tag, 0) for tag in tags)
    else:
        expected = _SHARE_OF_CHECKPOINT * checkpoint_bytes if MemoryTag.WEIGHTS in tags else 0.0
    return max(0, int(expected) - _SLACK_BYTES)


def group_traits(name: str, group: GroupConfig, update: WeightUpdate) -> Traits:
    """How a group goes through the lifecycle table.

    Raises:
        ConfigError: as ``release_policy`` does.
    """
    policy = release_policy(name, group, update)
    return Traits(
        needs_offload=group.needs_offload,
        is_frozen=update is WeightUpdate.FROZEN,
        weights_survive=policy.weights_cpu_backup or not group.needs_offload,
    )
