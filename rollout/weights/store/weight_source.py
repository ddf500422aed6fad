"""Where a restarted engine gets the published weights from, without the trainer.

Always true: a source either loads all weights of exactly the requested version into an engine,
which then reports that version, or it loads nothing and returns None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engines.protocol import Engine
from rollout.config import WeightUpdate
from rollout.core.types import EngineSlot
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.weight_push import PushTarget, WeightPush, push_weights

_ADAPTER_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore.

    Attributes:
        manifest: the tensors with their fingerprints; empty if the source has none.
        adapter: name of the LoRA adapter; empty for none.
        base_version: the version of the base under the adapter; None without an adapter.
    """

    manifest: Manifest = field(default_factory=lambda: Manifest({}))
    adapter: str = ""
    base_version: int | None = None


class WeightSource(Protocol):
    """Holds weights of some versions."""

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored | None:
        """Load weights into ``engine``; None if this source does not have that version."""
        ...


@dataclass(frozen=True, slots=True)
class DiskSource:
    """Checkpoints that the trainer saves.

    Attributes:
        path: a folder's path with ``{version}`` in it, as the engine's node sees it.
        only: the version that is there; None for all.
    """

    path: str
    only: int | None = None

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored | None:
        folder = self.path.replace("{version}", str(version))
        is_other = self.only is not None and self.only != version
        if is_other or not (Path(folder) / "config.json").is_file():
            return None
        await engine.update_weights_from_disk(folder, weight_version=str(version))
        return Restored()


class AdapterSource:
    """The LoRA adapter that was pushed last, over base weights from elsewhere.

    Attributes:
        base_version: version of the base that was pushed; 0: it is the one on disk.
    """

    def __init__(self) -> None:
        self.base_version = 0
        self._payload_copies = 1
        self._last: WeightPush | None = None
        self._bases: Sequence[WeightSource] = ()

    def over(self, bases: Sequence[WeightSource]) -> AdapterSource:
        """Set the sources of the base; returns itself."""
        self._bases = bases
        return self

    def has_pushed(self, push: WeightPush, contents: WeightUpdate, payload_copies: int) -> None:
        """Record a push. An adapter is small enough to be kept."""
        self._payload_copies = payload_copies
        if contents is WeightUpdate.LORA:
            self._last = push
        elif contents is WeightUpdate.FULL:
            self.base_version = push.version

    def forget(self, version: int | None) -> None:
        """An adapter of this version failed its check: no engine gets it again."""
        if self._last is not None and self._last.version == version:
            self._last = None

    async def reload(self, targets: Mapping[str, PushTarget]) -> bool:
        """Load the last adapter again, after another was refused; whether all engines have it."""
        if self._last is None:  # they had none, and still have none
            return True
        replies = await push_weights(self._last, targets, budget_s=_ADAPTER_TIMEOUT_S)
        return not any(reply.failure for reply in replies.values())

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored | None:
        push = self._last
        if push is None or push.version != version:
            return None
        if self.base_version and not await self._restored_base(engine, slot):
            return None
        replies = await push_weights(
            push,
            {"restored": PushTarget(engine, self._payload_copies)},
            budget_s=_ADAPTER_TIMEOUT_S,
        )
        failure = replies["restored"].failure
        if failure is not None:
            raise failure
        return Restored(adapter=push.adapter, base_version=self.base_version)

    async def _restored_base(self, engine: Engine, slot: EngineSlot) -> bool:
        for source in self._bases:
            if await source.restore(engine, self.base_version, slot):
                return True
        return False
