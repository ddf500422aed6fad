"""The recorded state of one engine of a group.

Always true: ``released`` records the released memory tags, and alone decides which tags may be
released or resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engines.launch import RunningEngine
from engines.protocol import (
    Engine,
    EngineAccess,
    GpuMemory,
    MemoryTag,
    PauseMode,
    TensorInfo,
    WeightsReport,
)
from engines.protocol.errors import EngineRejected
from engines.protocol.logprob_kind import BEFORE_CUTS, LogprobRule
from rollout.control.engine.drafts import DraftRecord
from rollout.core.errors import LifecycleError
from rollout.core.types import EngineSlot, EngineStatus
from rollout.rules.fingerprint_check import (
    changed_adapter,
    is_checker_refusal,
    without_adapters,
    without_experts,
)
from rollout.rules.probe import Answers, CanaryLogprobs
from rollout.weights.format.manifest import Manifest, TensorSpec

_NO_CHECKER = "it does not report fingerprints"


@dataclass(eq=False, slots=True)
class EngineState:
    """One engine and its recorded state.

    Attributes:
        num_payloads: copies of a payload that it needs, one per tensor-parallel rank.
        why_no_groups: why it joins no broadcast groups.
        why_no_handles: why it takes no CUDA IPC handles.
        encodings: see ``EngineStatus``.
        needs_names, logprobs, bootstrap_port: see ``EngineStatus``.
        update_group: name of its broadcast group, or empty for none.
        is_verified: its weights were verified after their last change.
        record: its fingerprints at its last verification, or None if there were none.
        changed: names of the tensors that were pushed since the record.
        snapshot: its fingerprints when it copied its weights, to check the push path.
        has_checker: it reports fingerprints of its weights, and the settings use them.
        compares_weights: it can compare its weights with a copy that it made of them.
        fingerprint_method: how it makes fingerprints, or empty if a trainer cannot make the same
            ones.
        checker_refusal: why its checker cannot report these weights, or empty if it can.
        why_partial: why its last fingerprints are not of all its ranks.
        moves_experts: it places its experts by their load, so they are not compared.
        reports_memory: it reports the memory of each tag.
        is_paused: it may generate nothing, because it was given a pause and has not answered a
            continue.
        released_bytes: what each tag held when it was released, as far as it reported that, and
            at most what was freed.
        used_after: memory in use after its last release or resume, or None if not measured.
        reports_groups: it reports its broadcast groups.
        tensors: its own list of weights, or empty if it reports none.
        pushed: the trainer's fingerprints of the pushed tensors; ``pushed_dtypes`` likewise.
        adapters: the versions of adapters that it has loaded, by its names for them, and what it
            has reported of each: fingerprints by tensor, or nothing.
        expected: log-probs of the trainer's model for the canary prompts, by adapter.
        canary: its log-probs at its last log-prob check, by adapter; see ``probe``.
        sentinel: its last answers to the sentinel, or None if it is not asked.
        sees_images: its model does, so the sentinel shows it one.
        names_images_by_file: the engine takes no other names of images.
        refuses_long_prompts: it has refused the one of the sentinel.
        needs_logprob_check: fingerprints were inconclusive, so it must pass before it serves.
        is_stale: it restarted and lacks the pushed weights.  It goes through every phase with the
            others, but gets no request.
        is_gone: it is fenced, and known to have ended.
        is_asleep: paused and flushed, without the memory that its group releases; it is none of
            the engines of its group.
        process_name: name of its process and its log, or empty if that is its id.
        fence_cause: its first reason to be fenced, when a try to replace it gave it another.
        start: start of an attached engine's process, see ``ServerInfo.start``; else empty.
        drafts: its drafted tokens, or None without a draft.
    """

    slot: EngineSlot
    process: RunningEngine
    engine: Engine
    has_session: bool
    weight_version: int | None
    num_payloads: int = 1
    why_no_groups: str = ""
    why_no_handles: str = ""
    encodings: tuple[str, ...] = ()
    needs_names: bool = False
    logprobs: LogprobRule = BEFORE_CUTS
    bootstrap_port: int = 0
    update_group: str = ""
    released: set[MemoryTag] = field(default_factory=set)
    is_paused: bool = False
    released_bytes: dict[MemoryTag, int] = field(default_factory=dict)
    is_verified: bool = True
    fence_reason: str = ""
    has_checker: bool = False
    compares_weights: bool = False
    fingerprint_method: str = ""
    checker_refusal: str = ""
    why_partial: str = ""
    moves_experts: bool = False
    reports_memory: bool = False
    used_after: int | None = None
    reports_groups: bool = False
    record: WeightsReport | None = None
    changed: frozenset[str] = frozenset()
    snapshot: WeightsReport | None = None
    tensors: tuple[TensorInfo, ...] = ()
    pushed: dict[str, str] = field(default_factory=dict)
    pushed_dtypes: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, Mapping[str, str]] = field(default_factory=dict)
    expected: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    canary: dict[str, CanaryLogprobs] = field(default_factory=dict)
    sentinel: Answers | None = None
    sees_images: bool = False
    names_images_by_file: bool = False
    refuses_long_prompts: bool = False
    needs_logprob_check: bool = False
    is_stale: bool = False
    is_gone: bool = False
    is_asleep: bool = False
    process_name: str = ""
    fence_cause: str = ""
    start: str = ""
    drafts: DraftRecord | None = None

    @property
    def engine_id(self) -> str:
        return self.slot.engine_id

    @property
    def current_slot(self) -> EngineSlot:
        """Its slot on its current nodes; bundles of a lost node move to another node."""
        nodes = self.process.node_ids
        if not nodes:
            return self.slot
        pairs = zip(self.slot.shares, nodes, strict=True)
        first, *more = (replace(share, node_id=node) for share, node in pairs)
        return replace(self.slot, node_id=first.node_id, more=tuple(more))

    @property
    def manifest(self) -> Manifest:
        """Its own list of tensors, without tied names."""
        return Manifest.of(
            TensorSpec(tensor.name, tensor.dtype, tensor.shape)
            for tensor in self.tensors
            if not tensor.is_tied
        )

    @property
    def tied(self) -> frozenset[str]:
        """Other names of tensors that are in ``manifest``."""
        return frozenset(tensor.name for tensor in self.tensors if tensor.is_tied)

    def comparable_fingerprints(self) -> dict[str, str]:
        """The trainer's fingerprints of pushed tensors whose dtype the engine kept.  It converted
        the others to its own dtype, so their fingerprints differ."""
        own = {tensor.name: tensor.dtype for tensor in self.tensors}
        return {
            name: text
            for name, text in self.pushed.items()
            if own.get(name) == self.pushed_dtypes.get(name)
        }

    @property
    def has_all_fingerprints(self) -> bool:
        """Whether it reports comparable fingerprints of all base weights, as far as is known."""
        is_whole = not (self.checker_refusal or self.why_partial or self.moves_experts)
        return self.has_checker and is_whole

    @property
    def why_adapters_unknown(self) -> str:
        """Why its fingerprints say nothing of an adapter."""
        unknown = next((name for name, reported in self.adapters.items() if not reported), "")
        return f"it does not report fingerprints of adapter {unknown!r}" if unknown else ""

    @property
    def why_no_fingerprints(self) -> str:
        """Why ``fingerprints`` returned None."""
        refusal = self.checker_refusal
        return f"its weights checker refuses: {refusal}" if refusal else _NO_CHECKER

    async def pause(self, mode: PauseMode) -> None:
        """Stop its generation."""
        self.is_paused = True
        await self.engine.pause_generation(mode)

    async def continue_generation(self) -> None:
        """Let it generate again."""
        await self.engine.continue_generation()
        self.is_paused = False

    async def fingerprints(self) -> WeightsReport | None:
        """Fingerprints of its current base, or None if it does not report them.

        Raises:
            LifecycleError: an adapter is not what it was when it was loaded.
        """
        if not self.has_checker:
            return None
        try:
            report = await self.engine.weights_checker()
        except EngineRejected as error:
            if not is_checker_refusal(error.status, has_reported=self.record is not None):
                raise
            self.checker_refusal = str(error)
            return None
        self.checker_refusal, self.why_partial = "", report.why_partial
        if wrong := changed_adapter(report, self.adapters):
            raise LifecycleError(f"tensor {wrong!r} is not what it was when it was loaded")
        report = without_adapters(report)
        return without_experts(report) if self.moves_experts else report

    async def gpu_memory(self) -> Sequence[GpuMemory]:
        """Memory of its GPUs, in order of rank, or empty if it has none, or if not measured."""
        return (await self.process.gpu_memory() or ()) if self.slot.gpu_ids else ()

    async def used_bytes(self) -> int | None:
        """The memory in use where a release shows: on its GPUs, or of the host if it has none.

        Pages of the host that back up a GPU's memory grow with a release.  Programs beside it on
        its GPUs count too.  None if it is not measured.
        """
        if not self.slot.gpu_ids:
            return await self.process.resident_bytes()
        gpus = await self.gpu_memory()
        return sum(gpu.used_bytes for gpu in gpus) if gpus else None

    async def own_bytes(self) -> int | None:
        """The same, without programs beside it, or None if the driver does not separate them."""
        if not self.slot.gpu_ids:
            return await self.process.resident_bytes()
        own = [gpu.own_bytes for gpu in await self.gpu_memory()]
        return None if None in own or not own else sum(num or 0 for num in own)

    async def memory_by_tag(self) -> Mapping[str, int]:
        """Its current memory in bytes by tag, or empty if it does not report it."""
        return (await self.engine.server_info()).resident_bytes if self.reports_memory else {}

    def is_verified_at(self, version: int) -> bool:
        """Whether all its weights are verified to be those of ``version``."""
        is_whole = self.is_verified and not self.needs_logprob_check and not self.is_stale
        return is_whole and self.weight_version == version

    def mark_verified(self, report: WeightsReport | None) -> None:
        """Record that its weights are verified, with their fingerprints."""
        self.is_verified = True
        self.record = report
        self.changed = frozenset()

    @property
    def access(self) -> EngineAccess:
        """What calls to it carry."""
        return self.process.access.of(self.start)

    @property
    def own_canary(self) -> dict[str, CanaryLogprobs]:
        """Its log-probs without an adapter."""
        return {adapter: found for adapter, found in self.canary.items() if not adapter}

    def know_from(self, old: EngineState | None) -> None:
        """Forget what it reported of itself: its weights are compared with those that the engine
        before it on its slot had at the same version.

        Args:
            old: the engine before it, or None if there was none.
        """
        self.record, self.canary = None, {}
        is_known = old is not None and old.is_verified and not old.changed
        if old is not None and is_known and old.weight_version == self.weight_version:
            self.record, self.canary = old.record, old.own_canary
            self.pushed, self.pushed_dtypes = dict(old.pushed), dict(old.pushed_dtypes)
            self.expected = dict(old.expected)

    async def status(self, phase: str) -> EngineStatus:
        """Its public status.

        Args:
            phase: the phase of its group.
        """
        resident_bytes = await self.process.resident_bytes()
        state = "fenced" if self.fence_reason else "stale" if self.is_stale else phase
        return EngineStatus(
            engine_id=self.engine_id,
            endpoint=self.process.endpoint,
            state=state,
            weight_version=self.weight_version,
            released=tuple(sorted(self.released)),
            node_id=self.process.node_id or self.slot.node_id,
            pid=self.process.pid,
            resident_bytes=resident_bytes,
            fence_reason=self.fence_reason,
            is_stale=self.is_stale,
            is_verified=self.is_verified and not self.needs_logprob_check,
            is_paused=self.is_paused,
            processes=tuple(self.process.processes),
            gpus=tuple(await self.gpu_memory()),
            fingerprints=self.fingerprint_method if self.has_checker else "",
            num_gpus=self.slot.num_gpus,
            num_payloads=self.num_payloads,
            why_no_groups=self.why_no_groups,
            why_no_handles=self.why_no_handles,
            encodings=self.encodings,
            needs_names=self.needs_names,
            logprobs=self.logprobs,
            bootstrap_port=self.bootstrap_port,
            process_name=self.process_name,
            start=self.start,
            access=self.access,
            drafts=None if self.drafts is None else self.drafts.figures(),
        )

    # After a phase that failed half-way, engines of one group may differ.  The lifecycle table does
    # not show that, so these two look at the engine itself.

    def why_cannot_serve(self) -> str:
        """Why it must not generate."""
        if self.released:
            return self._has_released()
        if not self.is_verified and not self.is_stale:
            return f"the weights of engine {self.engine_id} were not verified"
        return ""

    def why_cannot_update(self) -> str:
        """Why it cannot take new weights."""
        return self._has_released() if MemoryTag.WEIGHTS in self.released else ""

    def _has_released(self) -> str:
        return f"engine {self.engine_id} has {', '.join(sorted(self.released))} released"
