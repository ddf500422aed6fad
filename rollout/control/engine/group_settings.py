"""The settings of one group."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.config import (
    EncodingChoice,
    GroupConfig,
    HealthConfig,
    LifecycleConfig,
    Transport,
    VerifyConfig,
    WeightUpdate,
)
from rollout.weights.store.weight_source import DiskSource, WeightSource


def fewest_engines(group: GroupConfig, lifecycle: LifecycleConfig, num: int) -> int:
    """How many of ``num`` engines a group needs to continue."""
    if group.min_engines is not None:
        return group.min_engines
    return num if lifecycle.on_failure == "raise" else min(1, num)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The part of a server's configuration that one group needs.

    Attributes:
        run_id: id of its run; calls to its engines name it.
        path: dotted path of the group's settings, for messages.
        log_dir: folder for the logs of its engines and its timeline.
        otel: whether its timeline is also exported through OpenTelemetry.
        sources: weight sources for a restarted engine, tried before the disk.
        transport: how pushes reach its engines.
        encoding: how their tensors are written.
        not_pushed: patterns of tensors that a full push does not contain.
    """

    name: str
    path: str
    model_path: str
    log_dir: str
    group: GroupConfig
    update: WeightUpdate
    lifecycle: LifecycleConfig
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    otel: bool = False
    sources: tuple[WeightSource, ...] = ()
    transport: Transport = Transport.AUTO
    encoding: EncodingChoice = EncodingChoice.FULL
    not_pushed: tuple[str, ...] = ()
    run_id: str = ""

    @property
    def source(self) -> str:
        """``server/group``, the name of its timeline."""
        return f"{self.path.split('.')[1]}/{self.name}"

    @property
    def raises(self) -> bool:
        """Whether the failure of one engine stops the step."""
        return self.lifecycle.on_failure == "raise"

    def all_sources(self) -> tuple[WeightSource, ...]:
        """Weight sources for a restarted engine, in the order in which they are tried."""
        path = self.health.weights_path
        disk = () if path is None else (DiskSource(path),)
        # A standby has discarded what it loaded at its start, which is version 0.
        first = (DiskSource(self.model_path, only=0),) if self.group.standby else ()
        return (*self.sources, *disk, *first)
