"""A shared disk: rank 0 writes a checkpoint of the version, and all engines load it.

What is encoded is no checkpoint: its buckets are beside those, and go with the push.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rollout.config import ServerConfig, Transport
from rollout.core.errors import ConfigError
from rollout.weights.format.bucket_layout import lay_out
from rollout.weights.routes.rank_end import Places, RankEnd, RouteRow, Shares
from rollout.weights.routes.route import Chosen, EnginePlace, Payload
from rollout.weights.routes.shared_memory import ByPath

if TYPE_CHECKING:
    from rollout.weights.tensors.sources import Pairs


def reach(ranks: Places, engine: EnginePlace) -> Chosen | str:
    """To any engine: nothing shows whether it sees the folder."""
    return Chosen(Transport.DISK)


def open_share(end: RankEnd, chosen: Chosen) -> CheckpointBuilder | EncodedBuilder | None:
    """Rank 0 writes; the other ranks only gather."""
    if end.rank:
        return None
    folder = folder_of(end.config, end.terms.version)
    if not chosen.is_full:
        return EncodedBuilder(folder)
    return CheckpointBuilder(folder, end.config.model_path, end.terms.fingerprints)


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
    """Writes a checkpoint into a temporary folder, one file per bucket; renamed when complete.

    Args:
        folder: its path; an existing folder is replaced.
        copied: the checkpoint that the engines started from, for config and tokenizer.
        method: of the fingerprints; empty takes none.
    """

    def __init__(self, folder: str | Path, copied: str | Path, method: str = "") -> None:
        self._method = method
        self._folder = Path(folder)
        self._beside = self._folder.with_name(f".{self._folder.name}.writing")
        self._copied = Path(copied)
        self._num_files = 0

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any]:
        from rollout.weights.tensors.bucket_bytes import fingerprints_of

        if not self._num_files:
            shutil.rmtree(self._beside, ignore_errors=True)
            self._beside.mkdir(parents=True)
        self._num_files += 1
        with (self._beside / f"bucket-{self._num_files:05d}.safetensors").open("wb") as file:
            _write(file, pairs)
        return {"fingerprints": fingerprints_of(pairs, self._method)}

    def finish(self) -> Payload:
        """Complete the checkpoint; what the engines get after the last bucket."""
        for file in self._copied.glob("*"):
            if file.is_file() and not file.name.startswith(".") and not _holds_weights(file):
                shutil.copy2(file, self._beside / file.name)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._beside.rename(self._folder)
        return {"path": str(self._folder)}

    def close(self) -> None:
        shutil.rmtree(self._beside, ignore_errors=True)


class EncodedBuilder:
    """Writes each bucket, encoded, into a folder of its own, which engines load at once.

    Args:
        folder: of the checkpoint that is not written.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(f"{folder}.encoded")

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any]:
        path = self._folder / f"{index:05d}"
        if not index:
            self.close()  # of a process that was killed
        path.mkdir(parents=True)
        with (path / "bucket.safetensors").open("wb") as file:
            _write(file, pairs)
        return {"path": str(path)}

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def join(chosen: Chosen, shares: Shares, ranks: Places, pairs: Pairs) -> Sequence[Payload]:
    """What was encoded of a bucket; whole tensors come with the last one, as a checkpoint."""
    return [{"path": share["path"]} for share in shares.values() if "path" in share]


def _write(file: BinaryIO, pairs: Pairs) -> None:
    """A bucket as safetensors, on the disk when it returns."""
    from engines.tensors.torch_fingerprint import as_bytes

    layout = lay_out(pairs.specs)
    file.write(layout.header)
    for name, tensor in sorted(pairs, key=lambda pair: layout.offsets[pair[0]][0]):
        assert file.tell() == layout.offsets[name][0]
        file.write(memoryview(as_bytes(tensor).cpu().numpy()))  # type: ignore[arg-type]
    file.flush()
    os.fsync(file.fileno())


def _holds_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(
        ".index.json"
    )


ROW = RouteRow(
    Transport.DISK,
    reach,
    lambda chosen: ByPath(),
    open_share,
    join,
    is_automatic=False,
    is_encoded=True,
)
