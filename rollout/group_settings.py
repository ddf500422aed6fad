"""What one group is told of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.config import GroupConfig, HealthConfig, LifecycleConfig, WeightUpdate
from rollout.weights.source import DiskSource, WeightSource


def fewest_engines(group: GroupConfig, lifecycle: LifecycleConfig, num: int) -> int:
    """How many of ``num`` engines a group must have to go on."""
    if group.min_engines is not None:
        return group.min_engines
    return num if lifecycle.on_failure == "raise" else min(1, num)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The slice of a server's configuration that one group needs.

    Attributes:
        path: dotted path of the group's settings, for messages.
        log_dir: folder its engines log into, and its timeline.
        otel: its timeline also goes through OpenTelemetry.
        sources: where a restarted engine gets its weights from before the disk is tried.
    """

    name: str
    path: str
    model_path: str
    log_dir: str
    group: GroupConfig
    update: WeightUpdate
    lifecycle: LifecycleConfig
    health: HealthConfig = field(default_factory=HealthConfig)
    otel: bool = False
    sources: tuple[WeightSource, ...] = ()

    @property
    def source(self) -> str:
        """``server/group``, which its timeline goes by."""
        return f"{self.path.split('.')[1]}/{self.name}"

    def fewest_engines(self, num: int) -> int:
        """How many of ``num`` engines the group must have to go on."""
        return fewest_engines(self.group, self.lifecycle, num)

    @property
    def raises(self) -> bool:
        """Whether the failure of one engine stops the step."""
        return self.lifecycle.on_failure == "raise"

    def all_sources(self, *between: WeightSource) -> tuple[WeightSource, ...]:
        """Where a restarted engine gets its weights from, in this order.

        Args:
            between: those that are asked before the disk.
        """
        path = self.health.weights_path
        disk = () if path is None else (DiskSource(path),)
        return (*self.sources, *between, *disk)
