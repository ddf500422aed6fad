"""A shared disk: rank 0 writes a checkpoint of the version, and all engines load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout.config import ServerConfig, Transport
from rollout.core.errors import ConfigError
from rollout.weights.routes.rank_end import Places, RankEnd, RouteRow
from rollout.weights.routes.route import Chosen, EnginePlace, Payload
from rollout.weights.routes.shared_memory import ByPath

if TYPE_CHECKING:
    from rollout.weights.tensors.bucket_bytes import CheckpointWriter
    from rollout.weights.tensors.sources import Pairs


def reach(ranks: Places, engine: EnginePlace) -> Chosen | str:
    """To any engine: nothing shows whether it sees the folder."""
    return Chosen(Transport.DISK)


def open_share(end: RankEnd, chosen: Chosen) -> CheckpointBuilder | None:
    """Rank 0 writes; the other ranks only gather."""
    if end.rank:
        return None
    from rollout.weights.tensors.bucket_bytes import CheckpointWriter

    folder = folder_of(end.config, end.terms.version)
    return CheckpointBuilder(
        CheckpointWriter(folder, end.config.model_path, end.terms.fingerprints)
    )


def folder_of(config: ServerConfig, version: int) -> str:
    """The folder of a version.

    Raises:
        ConfigError: there is no setting for it.
    """
    path = config.weights.disk_path
    if path is None:
        raise ConfigError(
            "weights.transport = disk needs weights.disk_path, a folder with {version} in it "
            "that trainer and engines can both read",
            setting="weights.disk_path",
        )
    return path.replace("{version}", str(version))


class CheckpointBuilder:
    """Writes each bucket as a file of the checkpoint."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any]:
        return {"fingerprints": self._writer.add(pairs)}

    def finish(self) -> Payload:
        """Complete the checkpoint; what the engines get after the last bucket."""
        return {"path": str(self._writer.finish())}

    def close(self) -> None:
        self._writer.drop()


ROW = RouteRow(Transport.DISK, reach, lambda chosen: ByPath(), open_share, is_automatic=False)
