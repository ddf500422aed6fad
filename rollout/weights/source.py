"""Where a restarted engine gets the published weights from, without the trainer.

Always true: a source either gives an engine all weights of exactly the version that is asked for,
and the engine then reports that version, or it gives nothing and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engines.protocol import Engine
from rollout.config import WeightUpdate
from rollout.types import EngineSlot
from rollout.weights.manifest import Manifest
from rollout.weights.push import PushTarget, WeightPush, push_weights
from rollout.weights.transports.as_adapter import AsAdapter

_ADAPTER_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Restored:
    """An engine was given what it was to have.

    Attributes:
        manifest: what that was, with its fingerprints; empty where the source has taken none.
        adapter: name of the adapter among it; empty for none.
        base_version: the version of what is under the adapter; None: it is all of one version.
    """

    manifest: Manifest = field(default_factory=lambda: Manifest({}))
    adapter: str = ""
    base_version: int | None = None


class WeightSource(Protocol):
    """Something that holds weights of some versions."""

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored | None:
        """Give ``engine`` the weights of ``version``; None if this source does not have them.

        Args:
            slot: where the engine is.
        """
        ...


@dataclass(frozen=True, slots=True)
class DiskSource:
    """Checkpoints that the trainer saves.

    Attributes:
        path: a folder's path with ``{version}`` in it, as the engine's node sees it.
    """

    path: str

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored | None:
        folder = self.path.replace("{version}", str(version))
        if not _is_checkpoint(folder):
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
        """The same, with where the base comes from."""
        self._bases = bases
        return self

    def has_pushed(self, push: WeightPush, contents: WeightUpdate, payload_copies: int) -> None:
        """Remember what was pushed: an adapter is small enough to be kept."""
        self._payload_copies = payload_copies
        if contents is WeightUpdate.LORA:
            self._last = push
        elif contents is WeightUpdate.FULL:
            self.base_version = push.version

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored | None:
        push = self._last
        if push is None or push.version != version:
            return None
        if self.base_version and not await self._restored_base(engine, slot):
            return None
        answers = await push_weights(
            push,
            {"restored": PushTarget(engine, self._payload_copies)},
            budget_s=_ADAPTER_TIMEOUT_S,
        )
        failure = answers["restored"].failure
        if failure is not None:
            raise failure
        name = push.carrier.name if isinstance(push.carrier, AsAdapter) else ""
        return Restored(adapter=name, base_version=self.base_version)

    async def _restored_base(self, engine: Engine, slot: EngineSlot) -> bool:
        for source in self._bases:
            if await source.restore(engine, self.base_version, slot):
                return True
        return False


def _is_checkpoint(folder: str) -> bool:
    return (Path(folder) / "config.json").is_file()
