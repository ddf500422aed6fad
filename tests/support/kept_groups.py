"""The broadcast group that a trainer keeps for its next push."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.weights.routes.trainer_groups import IdleGroup


def kept_group(idle: IdleGroup) -> str:
    """Its name; empty for none, also if the trainer has ended all its groups."""
    group = idle._group
    return group.root.name if group is not None and group.root.is_there else ""
