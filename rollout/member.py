"""One engine of a group, and all that is known of it.

Always true: what it has released is written down here per memory tag, and nothing else says what
may be released or resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engines.launch import RunningEngine
from engines.protocol import Engine, MemoryTag, TensorInfo, WeightsReport
from rollout.canary import Canary
from rollout.types import EngineSlot, EngineStatus
from rollout.verification import ADAPTER_PREFIX
from rollout.weights.manifest import Manifest, TensorSpec


@dataclass(slots=True)
class Member:
    """One engine and all that is known of it.

    Attributes:
        num_payloads: copies of a payload it wants, one per tensor-parallel rank.
        takes_flat_broadcast: a broadcast may bring it many tensors as one.
        update_group: name of the group for broadcasts that it is in; empty for none.
        is_proved: its weights were verified after they were last changed.
        record: its fingerprints when it was last proved; None where none were taken.
        changed: names of the tensors that were pushed since the record.
        has_checker: it can tell fingerprints of its weights, and is asked for them.
        gives_weights: it hands out its weights to others of its kind.
        tells_memory: it can tell how much memory each tag has.
        tells_groups: it says which groups for broadcasts it is in.
        tensors: what it says its weights are; empty where it cannot tell.
        pushed: fingerprints of what it was given, as the trainer took them; its dtypes beside it.
        base_version: the version that brought what is no adapter; None where nobody knows.
        adapter: name of the adapter that it was given; empty for none.
        expected: what the trainer's model told of the same prompts, by adapter; empty if nothing.
        canary: what it told of fixed prompts when it was last proved so, see ``hearing``.
        owes_canary: fingerprints have left open what it holds, so it has to tell before it serves.
        is_stale: it was started again and lacks what was pushed before: it goes through every
            phase with the others, but no request may reach it.
        is_gone: fenced, it has been ended for certain.
    """

    slot: EngineSlot
    process: RunningEngine
    engine: Engine
    has_session: bool
    weight_version: int | None
    num_payloads: int = 1
    takes_flat_broadcast: bool = False
    update_group: str = ""
    released: set[MemoryTag] = field(default_factory=set)
    is_proved: bool = True
    fenced_because: str = ""
    has_checker: bool = False
    gives_weights: bool = False
    tells_memory: bool = False
    tells_groups: bool = False
    record: WeightsReport | None = None
    changed: frozenset[str] = frozenset()
    tensors: tuple[TensorInfo, ...] = ()
    pushed: dict[str, str] = field(default_factory=dict)
    pushed_dtypes: dict[str, str] = field(default_factory=dict)
    base_version: int | None = None
    adapter: str = ""
    expected: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    canary: dict[str, Canary] = field(default_factory=dict)
    owes_canary: bool = False
    is_stale: bool = False
    is_gone: bool = False

    @property
    def engine_id(self) -> str:
        return self.slot.engine_id

    @property
    def place(self) -> EngineSlot:
        """Its slot as it is now: what was planned on a node that is lost has moved since."""
        nodes = self.process.node_ids
        if not nodes:
            return self.slot
        pairs = zip(self.slot.shares, nodes, strict=True)
        first, *more = (replace(share, node_id=node) for share, node in pairs)
        return replace(self.slot, node_id=first.node_id, more=tuple(more))

    @property
    def manifest(self) -> Manifest:
        """Its own list of tensors, each once."""
        return Manifest.of(
            TensorSpec(one.name, one.dtype, one.shape) for one in self.tensors if not one.is_tied
        )

    @property
    def tied(self) -> frozenset[str]:
        """Other names of tensors that are in ``manifest``."""
        return frozenset(one.name for one in self.tensors if one.is_tied)

    def comparable(self) -> dict[str, str]:
        """Trainer's fingerprints of the tensors that it holds as they were sent: others it has
        converted to its own dtype, and they cannot be compared."""
        own = {one.name: one.dtype for one in self.tensors}
        return {
            name: text
            for name, text in self.pushed.items()
            if name.startswith(ADAPTER_PREFIX) or own.get(name) == self.pushed_dtypes.get(name)
        }

    async def fingerprints(self) -> WeightsReport | None:
        """Of its weights as they are now; None where it cannot tell."""
        return await self.engine.weights_checker() if self.has_checker else None

    async def memory_by_tag(self) -> Mapping[str, int]:
        """What it says of its memory now; empty where it cannot tell."""
        return (await self.engine.server_info()).resident_bytes if self.tells_memory else {}

    def is_proved_at(self, version: int) -> bool:
        """Whether it holds the weights of ``version``, and nothing of them is open."""
        is_whole = self.is_proved and not self.owes_canary and not self.is_stale
        return is_whole and self.weight_version == version

    def prove(self, report: WeightsReport | None) -> None:
        """Its weights are as they should be, and this is what they look like."""
        self.is_proved = True
        self.record = report
        self.changed = frozenset()

    def status(self, phase: str, resident_bytes: int | None) -> EngineStatus:
        """It as others see it.

        Args:
            phase: where its group is.
        """
        state = "fenced" if self.fenced_because else "stale" if self.is_stale else phase
        return EngineStatus(
            engine_id=self.engine_id,
            endpoint=self.process.endpoint,
            state=state,
            weight_version=self.weight_version,
            released=tuple(sorted(self.released)),
            node_id=self.process.node_id or self.slot.node_id,
            pid=self.process.pid,
            resident_bytes=resident_bytes,
            fenced_because=self.fenced_because,
            is_stale=self.is_stale,
            processes=tuple(self.process.processes),
        )

    # A phase that failed half-way leaves engines apart from one another, which the table of the
    # lifecycle does not show: these look at the engine itself.

    def unfit_to_serve(self) -> str:
        """Why it must not generate; empty if it may."""
        if self.released:
            return self._has_released()
        if not self.is_proved and not self.is_stale:
            return f"the weights of engine {self.engine_id} were not verified"
        return ""

    def without_weights(self) -> str:
        """Why it cannot be given weights; empty if it can."""
        return self._has_released() if MemoryTag.WEIGHTS in self.released else ""

    def _has_released(self) -> str:
        return f"engine {self.engine_id} has {', '.join(sorted(self.released))} released"
