"""Where a restarted engine gets the published weights from, without the trainer.

Always true: a source either loads all weights of exactly the requested version into an engine,
which then reports that version, or it loads nothing and returns None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engines.protocol import Engine
from rollout.core.types import EngineSlot
from rollout.weights.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore.

    Attributes:
        manifest: the tensors with their fingerprints; empty if the source has none.
    """

    manifest: Manifest = field(default_factory=lambda: Manifest({}))


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
