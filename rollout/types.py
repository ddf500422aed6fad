"""The words as values: slots, and what a lifecycle phase reports.

All are immutable except ``Sample``, which ``rollout.samples`` makes and this passes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.protocol import Endpoint, ProcessIdentity, WorkerType
from rollout.checking_cost import CheckingCost, Read, cost_of
from rollout.samples import Sample as Sample
from rollout.samples import SampleGroup as SampleGroup
from rollout.samples import SampleStatus as SampleStatus


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What an engine has on one more node, see ``EngineSlot``."""

    node_id: str
    bundle_indices: tuple[int, ...] = ()
    gpu_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """The place one engine gets.

    Attributes:
        engine_id: ``<group>-<index>``, unique within a server.
        node_id: node it runs on, the first of several; ``local`` outside Ray.
        bundle_indices: the placement-group bundles it covers, in order; empty outside Ray.
        gpu_ids: physical GPU ids on that node, in order; empty for a CPU engine.
        num_cpus: CPU cores it may count on, on each of its nodes.
        more: its further nodes, in order of rank; each has as many GPUs as the first.
    """

    engine_id: str
    group: str
    index: int
    node_id: str = "local"
    bundle_indices: tuple[int, ...] = ()
    gpu_ids: tuple[int, ...] = ()
    num_cpus: float = 1.0
    more: tuple[NodeShare, ...] = ()

    @property
    def shares(self) -> tuple[NodeShare, ...]:
        """What it has on each of its nodes, in order of rank."""
        return (NodeShare(self.node_id, self.bundle_indices, self.gpu_ids), *self.more)


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one engine did in one phase.

    Attributes:
        elapsed_s: seconds its call took.
        failure: why it failed, in words; empty when it did not.
        freed_bytes: resident memory before minus after, for a release; 0 where not measured.
        proved_by: what it showed of its weights: ``fingerprint``, ``canary`` or ``version``.
        read_bytes, read_cpu_s: of weights for its fingerprints; None where it does not tell.
        skipped: it had nothing to do (already done, or the phase does not concern it).
    """

    engine_id: str
    elapsed_s: float = 0.0
    failure: str = ""
    freed_bytes: int = 0
    skipped: bool = False
    proved_by: str = ""
    read_bytes: int | None = None
    read_cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """What one group did for one command.

    Attributes:
        phase: where the group is now.
        elapsed_s: seconds from the command to the barrier.
    """

    group: str
    command: str
    phase: str
    elapsed_s: float
    engines: tuple[EngineReport, ...] = ()

    @property
    def freed_bytes(self) -> int:
        return sum(engine.freed_bytes for engine in self.engines)

    @property
    def failures(self) -> tuple[EngineReport, ...]:
        return tuple(engine for engine in self.engines if engine.failure)

    @property
    def reads(self) -> tuple[Read, ...]:
        """What its engines read of their weights for fingerprints."""
        return tuple(
            Read(engine.elapsed_s, engine.read_bytes, engine.read_cpu_s)
            for engine in self.engines
            if engine.proved_by == "fingerprint"
        )

    @property
    def checking(self) -> CheckingCost | None:
        """What that cost; None if nothing was read."""
        return cost_of(self.reads, self.elapsed_s)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a server command did, over all its groups.

    Attributes:
        phase_s: command -> seconds to its barrier (the slowest group).
        freed_bytes: memory the engines gave back.
        weight_version: version all serving engines hold.
    """

    phase_s: Mapping[str, float] = field(default_factory=dict)
    freed_bytes: int = 0
    weight_version: int = 0
    reports: tuple[PhaseReport, ...] = ()

    @property
    def checking(self) -> CheckingCost | None:
        """What the proof of the weights cost, by fingerprints; None if none were taken.

        ``str`` of it is a sentence.
        """
        reads = [read for one in self.reports for read in one.reads]
        return cost_of(reads, self.phase_s.get("verify", 0.0))

    def merged(self, later: StepReport) -> StepReport:
        """This report followed by ``later``; seconds of the same command add up."""
        seconds = dict(self.phase_s)
        for command, elapsed in later.phase_s.items():
            seconds[command] = seconds.get(command, 0.0) + elapsed
        return StepReport(
            seconds,
            self.freed_bytes + later.freed_bytes,
            later.weight_version,
            self.reports + later.reports,
        )


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine as its group sees it.

    Attributes:
        is_stale: it was started again and lacks what was pushed before; it serves nothing.
        processes: by which it is found again, one for each of its nodes; none where it is not
            ours.
    """

    engine_id: str
    endpoint: Endpoint
    state: str
    weight_version: int | None
    released: tuple[str, ...]
    node_id: str
    pid: int | None = None
    resident_bytes: int | None = None
    fenced_because: str = ""
    is_stale: bool = False
    processes: tuple[ProcessIdentity, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """One group: its phase and its engines.

    Attributes:
        lent: places whose engines were removed, and may come back.
    """

    name: str
    worker_type: WorkerType
    phase: str
    needs_offload: bool
    engines: tuple[EngineStatus, ...]
    lent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What the DRAM store of one server is doing.

    Attributes:
        is_on: whether pushes are kept.
        because: why not, or what failed last; empty if nothing did.
        version: the weight version that is kept; None before the first.
        is_writing: a newer one is on its way.
        node_bytes: memory it holds on each node that answers.
        write_s: how long the last write took.
        num_dropped: pushes that a later one overtook.
    """

    is_on: bool
    because: str = ""
    version: int | None = None
    is_writing: bool = False
    node_bytes: Mapping[str, int] = field(default_factory=dict)
    write_s: float = 0.0
    num_dropped: int = 0


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One rollout server: its groups, its router, and who holds its lifecycle lock.

    Attributes:
        store: None where none is configured.
    """

    name: str
    phase: str
    weight_version: int
    router_url: str
    gate: str
    lock_owner: str
    groups: tuple[GroupStatus, ...]
    store: StoreStatus | None = None
