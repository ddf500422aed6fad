"""Where a restarted engine gets the published weights from, without the trainer.

Always true: a source either gives an engine all weights of exactly the version that is asked for,
and the engine then reports that version, or it gives nothing and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engines.protocol import Engine


class WeightSource(Protocol):
    """Something that holds weights of some versions."""

    async def restore(self, engine: Engine, version: int, node_id: str) -> bool:
        """Give ``engine`` the weights of ``version``; False if this source does not have them.

        Args:
            node_id: where the engine runs.
        """
        ...


@dataclass(frozen=True, slots=True)
class DiskSource:
    """Checkpoints that the trainer saves.

    Attributes:
        path: a folder's path with ``{version}`` in it, as the engine's node sees it.
    """

    path: str

    async def restore(self, engine: Engine, version: int, node_id: str) -> bool:
        folder = self.path.replace("{version}", str(version))
        if not _is_checkpoint(folder):
            return False
        await engine.update_weights_from_disk(folder, weight_version=str(version))
        return True


def _is_checkpoint(folder: str) -> bool:
    return (Path(folder) / "config.json").is_file()
