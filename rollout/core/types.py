"""Value types: engine slots, reports of commands, and status.

All are immutable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.protocol import (
    NO_ACCESS,
    Endpoint,
    EngineAccess,
    GpuId,
    GpuMemory,
    ProcessIdentity,
    WorkerType,
)
from engines.protocol.logprob_kind import BEFORE_CUTS, LogprobRule


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The part of an engine on one of its nodes, see ``EngineSlot``."""

    node_id: str
    bundle_indices: tuple[int, ...] = ()
    gpu_ids: tuple[GpuId, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """The resources assigned to one engine.

    Attributes:
        engine_id: ``<group>-<index>``, unique within a server.
        node_id: node it runs on, the first if it has several; ``local`` outside Ray.
        bundle_indices: the placement-group bundles it covers, in order; empty outside Ray.
        gpu_ids: physical GPU ids on that node, in order, or empty for a CPU engine.
        num_cpus: CPU cores reserved for it on each of its nodes.
        shares_gpus: the trainer, or engines of other servers, use its GPUs too.
        more: its other nodes, in order of rank; each has as many GPUs as the first.
    """

    engine_id: str
    group: str
    index: int
    node_id: str = "local"
    bundle_indices: tuple[int, ...] = ()
    gpu_ids: tuple[GpuId, ...] = ()
    num_cpus: float = 1.0
    shares_gpus: bool = False
    more: tuple[NodeShare, ...] = ()

    @property
    def standby_name(self) -> str:
        """The name of the process that sleeps beside that of the engine."""
        return f"standby-{self.engine_id}"

    @property
    def shares(self) -> tuple[NodeShare, ...]:
        """Its parts on all of its nodes, in order of rank."""
        return (NodeShare(self.node_id, self.bundle_indices, self.gpu_ids), *self.more)

    @property
    def num_gpus(self) -> int:
        """Its GPUs on all of its nodes."""
        return sum(len(share.gpu_ids) for share in self.shares)


@dataclass(frozen=True, slots=True)
class EngineRank:
    """The part of an engine on one GPU.

    Attributes:
        tp_rank: the position of the GPU among those of the engine; its tensor-parallel rank, if
            the engine has no pipeline parallelism.
    """

    server: str
    engine_id: str
    tp_rank: int


@dataclass(frozen=True, slots=True)
class TrainerSlot:
    """One GPU of the trainer, as placed at the launch.

    Attributes:
        rank: the trainer's rank that belongs on this GPU.
        bundle_index: the bundle in the placement group, or None without Ray.
        node_id: ``local`` without Ray.
        gpu_id: id on this node, as Ray or ``CUDA_VISIBLE_DEVICES`` names it.
        engines: the engines on this GPU, at most one of each server, or empty if it has none.
    """

    rank: int
    bundle_index: int | None
    node_id: str
    gpu_id: GpuId
    engines: tuple[EngineRank, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """How many of the tokens that an engine's draft proposes are right.

    Attributes:
        draft: the path of its model, or the method that has one.
        share: right part of the drafted tokens since the engine continued, or None while too few
            are known.
        num_drafted: number of those tokens; for SGLang, which does not count them, a lower bound.
        weight_version: version with which it continued.
        highest_share: highest share of an earlier time, or None if there was none.
        highest_version: the weight version of that time.
        fall: a sentence if the share is less than half of the highest, else an empty text.
    """

    draft: str
    share: float | None = None
    num_drafted: int = 0
    weight_version: int | None = None
    highest_share: float | None = None
    highest_version: int | None = None
    fall: str = ""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The result of one command on one engine.

    Attributes:
        elapsed_s: seconds the call took.
        failure: why it failed, or empty if it did not.
        freed_bytes: memory before a release minus after it; 0 if not measured.
        used_bytes: memory after a release or resume, on its GPUs by all programs, or of the host if
            it has none, or None after other commands, or if not measured.
        num_gpus: its GPUs; 0 for an engine on the CPU.
        verified_by: how its weights were verified: ``fingerprint``, ``canary`` or ``version``.
        drafts: after ``continue_generation``, of the time before it, or None without a draft.
    """

    engine_id: str
    elapsed_s: float = 0.0
    failure: str = ""
    freed_bytes: int = 0
    verified_by: str = ""
    used_bytes: int | None = None
    num_gpus: int = 0
    drafts: DraftFigures | None = None


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """The result of one command on one group.

    Attributes:
        phase: the phase of the group after it.
        elapsed_s: seconds from the command to the barrier.
    """

    group: str
    command: str
    phase: str
    elapsed_s: float
    engines: tuple[EngineReport, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """Memory that its engines released."""
        return sum(engine.freed_bytes for engine in self.engines)

    @property
    def failures(self) -> tuple[EngineReport, ...]:
        """Reports of the engines that failed."""
        return tuple(engine for engine in self.engines if engine.failure)


@dataclass(frozen=True, slots=True)
class PushStage:
    """What one rank of the trainer did in one stage of a push.

    Attributes:
        stage: ``gather``: until the rank had the whole tensors of a bucket.  ``copy``: until it
            had written what it sends.  ``engine``, of rank 0: until the engines wanted the next
            bucket, or had applied the last one.  Where rank 0 sends alone (``by_value``,
            ``distributed``), its copies are part of ``engine``.
        route: how the bytes reach the engines, with the encoding if it is not whole tensors, or
            empty for ``gather``.
        num_bytes: size of the tensors that were gathered, of what this rank has sent, or of the
            tensors that were changed.
        density: the share of the elements that were changed, if only these were sent.
    """

    rank: int
    stage: str
    route: str
    num_bytes: int
    elapsed_s: float
    density: float | None = None

    @property
    def gib_per_s(self) -> float:
        """Bytes per second in GiB; 0 if nothing was measured."""
        return self.num_bytes / 2**30 / self.elapsed_s if self.elapsed_s else 0.0


@dataclass(frozen=True, slots=True)
class UnchangedWeights:
    """Weights that pushes should have changed and have not, by the trainer's fingerprints.

    Attributes:
        adapter: the LoRA adapter that was pushed, or empty for the base.
        patterns: patterns of its tensors, as ``weights.frozen`` takes them, or empty for whole
            pushes.
        num_pushes: the pushes in a row that left them as they were.
        what: the observation in one line.
        causes: the likely ones, the first first.
        advice: what to do, the best first.
    """

    adapter: str
    patterns: tuple[str, ...]
    num_tensors: int
    num_pushes: int
    what: str
    causes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of a server command over all groups.

    Attributes:
        phase_s: command -> seconds to its barrier (the slowest group).
        freed_bytes: memory that the engines released.
        weight_version: version of all serving engines.
        push_stages: seconds and bytes of each rank of a push; a single process is rank 0.
        paused_s: seconds in which no engine could generate because of a push.
        unchanged: what the last pushes did not change, or None if they have no fingerprints.
    """

    phase_s: Mapping[str, float] = field(default_factory=dict)
    freed_bytes: int = 0
    weight_version: int = 0
    reports: tuple[PhaseReport, ...] = ()
    push_stages: tuple[PushStage, ...] = ()
    paused_s: float = 0.0
    unchanged: tuple[UnchangedWeights, ...] | None = None

    @property
    def drafts(self) -> Mapping[str, DraftFigures]:
        """The drafted tokens of each engine with a draft, before this step."""
        engines = (engine for report in self.reports for engine in report.engines)
        return {engine.engine_id: engine.drafts for engine in engines if engine.drafts is not None}

    def merged(self, later: StepReport) -> StepReport:
        """This report followed by ``later``; seconds of the same command are added.

        Args:
            later: the next one.
        """
        seconds = dict(self.phase_s)
        for command, elapsed in later.phase_s.items():
            seconds[command] = seconds.get(command, 0.0) + elapsed
        return StepReport(
            seconds,
            self.freed_bytes + later.freed_bytes,
            later.weight_version,
            self.reports + later.reports,
            self.push_stages + later.push_stages,
            self.paused_s + later.paused_s,
            later.unchanged,
        )


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The status of one engine.

    Attributes:
        is_stale: it was restarted and lacks the published weights, so it serves nothing.
        is_verified: its weights were verified after their last change.
        is_paused: it may generate nothing, because its generation was paused.
        resident_bytes: host memory of its processes, or None if not measured.
        gpus: memory of its GPUs, with what other programs use, or empty if it has none or
            unmeasured.
        num_gpus: its GPUs; 0 for an engine on the CPU.
        num_payloads: its tensor-parallel ranks.
        processes: its processes, one for each of its nodes, or empty for an attached engine.
        fingerprints: the method of its fingerprints, or empty if they are not compared with pushed
            ones.
        why_no_groups: why it joins no broadcast groups.
        why_no_handles: why it takes no CUDA IPC handles.
        encodings: encodings of tensors that it applies besides whole tensors.
        needs_names: it has a store of prefixes that no call clears, so a request without a name of
            its weight version may get old ones.
        logprobs: at which step of sampling it takes its log-probs.
        bootstrap_port: see ``routing.Backend``; 0 where it reports none.
        process_name, start: see ``EngineState``.
        access: what calls to it carry; its repr hides the keys.
        standby: state of the engine that sleeps on its slot to take its place: ``ready``,
            ``booting``, or why there is none, or empty without ``standby``.
        drafts: how many of its drafted tokens are right, or None without a draft.
    """

    engine_id: str
    endpoint: Endpoint
    state: str
    weight_version: int | None
    released: tuple[str, ...]
    node_id: str
    pid: int | None = None
    resident_bytes: int | None = None
    fence_reason: str = ""
    is_stale: bool = False
    is_verified: bool = True
    is_paused: bool = False
    processes: tuple[ProcessIdentity, ...] = ()
    gpus: tuple[GpuMemory, ...] = ()
    fingerprints: str = ""
    num_gpus: int = 0
    num_payloads: int = 1
    why_no_groups: str = ""
    why_no_handles: str = ""
    encodings: tuple[str, ...] = ()
    needs_names: bool = False
    logprobs: LogprobRule = BEFORE_CUTS
    bootstrap_port: int = 0
    process_name: str = ""
    standby: str = ""
    start: str = ""
    access: EngineAccess = NO_ACCESS
    drafts: DraftFigures | None = None

    @property
    def process(self) -> str:
        """The name of its process, unlike that of one that sleeps beside it."""
        return self.process_name or self.engine_id


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """The status of one group.

    Attributes:
        vacant_slots: ids of engines that were removed and can be added again.
        kind: kind of its engines, a name of ``engines.kinds``.
        asleep: the standbys that are ready, by the ids of the engines beside which they sleep.
        python: the interpreter they run in, as ``EngineSpec.python``.
    """

    name: str
    worker_type: WorkerType
    phase: str
    needs_offload: bool
    engines: tuple[EngineStatus, ...]
    vacant_slots: tuple[str, ...] = ()
    kind: str = "sglang"
    asleep: tuple[EngineStatus, ...] = ()
    python: str = ""


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The status of the weight store of one server.

    Attributes:
        is_on: whether pushes are stored.
        reason: why they are not, or the last failure, or empty if there was none.
        version: the stored weight version, or None before the first.
        node_bytes: bytes it holds on each node that answers.
        write_s: seconds that the last write took.
        num_dropped: pushes that were not stored because a later push came first.
        sent_bytes: bytes that the last write sent to nodes whose memory the server's process cannot
            map.
    """

    is_on: bool
    reason: str = ""
    version: int | None = None
    node_bytes: Mapping[str, int] = field(default_factory=dict)
    write_s: float = 0.0
    num_dropped: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The status of one rollout server.

    Attributes:
        lock_owner: the command that runs now, or empty if none does.
        base_version: the version that engines report: of the base, where adapters are pushed.
        store: None if no weight store is configured.
        unchanged: see ``StepReport``.
        agents_urls: addresses of the workers that take chats of sessions, by their numbers.
    """

    name: str
    phase: str
    weight_version: int
    router_url: str
    gate: str
    lock_owner: str
    groups: tuple[GroupStatus, ...]
    store: StoreStatus | None = None
    base_version: int = 0
    unchanged: tuple[UnchangedWeights, ...] | None = None
    agents_urls: tuple[str, ...] = ()
