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
from rollout.core.errors import RolloutError
from rollout.core.types import EngineSlot
from rollout.weights.format.checkpoint_files import why_not_whole
from rollout.weights.format.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore.

    Attributes:
        manifest: the tensors with their fingerprints, or empty if the source has none.
    """

    manifest: Manifest = field(default_factory=lambda: Manifest({}))


class WeightSource(Protocol):
    """Holds weights of some versions."""

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored | None:
        """Load weights into ``engine``, or None if this source does not have that version.

        Raises:
            RolloutError: the engine may hold a part of them.
        """
        ...

    async def why_lacks(self, version: int) -> str:
        """Why this source does not have that version."""
        ...


@dataclass(frozen=True, slots=True)
class DiskSource:
    """Checkpoints that the trainer saves.

    Attributes:
        path: a folder's path with ``{version}`` in it, as the engine's node sees it.
        only: the version that is there, or None for all.
    """

    path: str
    only: int | None = None
    _refused: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored | None:
        if self._why_absent(version):
            return None
        folder = self._folder(version)
        before = _inode(folder)
        if why_not := await asyncio.to_thread(why_not_whole, folder):
            if why_not not in self._refused:  # it is looked at again and again
                self._refused.add(why_not)
                logger.warning("weight version %d is not loaded from disk: %s", version, why_not)
            return None
        await engine.update_weights_from_disk(str(folder), weight_version=str(version))
        if _inode(folder) != before:
            raise RolloutError(
                f"{folder} was replaced while the engine loaded it, so it may have tensors of both"
            )
        return Restored()

    async def why_lacks(self, version: int) -> str:
        absent = self._why_absent(version)
        return absent or await asyncio.to_thread(why_not_whole, self._folder(version))

    def _why_absent(self, version: int) -> str:
        folder = self._folder(version)
        if self.only is not None and self.only != version:
            return f"{folder} has weight version {self.only} only"
        return "" if (folder / "config.json").is_file() else f"{folder} is no checkpoint"

    def _folder(self, version: int) -> Path:
        return Path(self.path.replace("{version}", str(version)))


def _inode(folder: Path) -> int | None:
    """Which folder is at a path, or None if there is none."""
    try:
        return os.stat(folder).st_ino
    except OSError:
        return None
