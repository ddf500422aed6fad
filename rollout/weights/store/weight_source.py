"""Where a restarted engine gets the published weights from, without the trainer.

Always true: a source either loads all weights of exactly the requested version into an engine,
which then reports that version, or it loads nothing and returns None.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engines.protocol import Engine
from rollout.core.errors import WeightsUnavailable
from rollout.core.types import EngineSlot
from rollout.weights.format.checkpoint_files import why_not_whole
from rollout.weights.format.manifest import Manifest

logger = logging.getLogger(__name__)


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
        """Load weights into ``engine``; None if this source does not have that version.

        Raises:
            WeightsUnavailable: the engine may hold a part of them.
        """
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
    _refused: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored | None:
        folder = Path(self.path.replace("{version}", str(version)))
        is_other = self.only is not None and self.only != version
        if is_other or not (folder / "config.json").is_file():
            return None
        before = _inode(folder)
        if why_not := await asyncio.to_thread(why_not_whole, folder):
            if why_not not in self._refused:  # it is looked at again and again
                self._refused.add(why_not)
                logger.warning("weight version %d is not loaded from disk: %s", version, why_not)
            return None
        await engine.update_weights_from_disk(str(folder), weight_version=str(version))
        if _inode(folder) != before:
            raise WeightsUnavailable(
                f"{folder} was replaced while the engine loaded it, so it may have tensors of both"
            )
        return Restored()


def _inode(folder: Path) -> int | None:
    """Which folder is at a path; None if there is none."""
    try:
        return os.stat(folder).st_ino
    except OSError:
        return None
