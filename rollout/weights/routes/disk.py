"""A shared disk: rank 0 writes a checkpoint of the version, and all engines load it.

Always true: a checkpoint is there whole, or it is not there, also after a power failure; what else
a push writes, such as encoded buckets, is in a folder beside it that goes with the push; what a
killed one has left there, the next push to any version removes, and puts back the checkpoint that
it was about to replace.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from engines.process.locks import Hold, make_held, remove_unheld
from rollout.config import ServerConfig, Transport
from rollout.core.errors import ConfigError
from rollout.core.machine import sync_folder
from rollout.weights.format.bucket_layout import lay_out
from rollout.weights.format.checkpoint_files import INDEX_FILE
from rollout.weights.routes.rank_end import Places, RankEnd, RouteRow, Shares
from rollout.weights.routes.route import Chosen, EnginePlace, Payload
from rollout.weights.routes.shared_memory import ByPath

if TYPE_CHECKING:
    from rollout.weights.tensors.sources import Pairs

_PREFIX = ".rollout-push-"
# In the folder of a push: what becomes the checkpoint, what it replaces, and a link to its place.
_NEW, _OLD, _PLACE = "new", "old", "place"


def reach(ranks: Places, engine: EnginePlace) -> Chosen | str:
    """To any engine: nothing shows whether it sees the folder."""
    return Chosen(Transport.DISK)


def open_share(end: RankEnd, chosen: Chosen) -> CheckpointBuilder | EncodedBuilder | None:
    """Rank 0 writes; the other ranks only gather."""
    if end.rank:
        return None
    path = _disk_path(end.config)
    workplace = Workplace(Path(path.partition("{version}")[0] + "-").parent)
    if not chosen.is_full:
        return EncodedBuilder(workplace)
    folder = path.replace("{version}", str(end.terms.version))
    return CheckpointBuilder(workplace, folder, end.config.model_path, end.terms.fingerprints)


def _disk_path(config: ServerConfig) -> str:
    path = config.weights.disk_path
    if path is None:
        raise ConfigError(
            "weights.transport = disk needs weights.disk_path, a folder with {version} in it "
            "that trainer and engines can both read",
            setting="weights.disk_path",
        )
    return path


class Workplace:
    """The folder in which one push writes; it is made when it is needed, and goes with the push.

    Args:
        parent: of all versions.

    Attributes:
        parent: of all versions.
    """

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self._hold: Hold | None = None

    @property
    def folder(self) -> Path:
        """Its path.  It is made after leftovers of killed pushes beside it were removed."""
        if self._hold is None:
            self.parent.mkdir(parents=True, exist_ok=True)
            for left in self.parent.glob(f"{_PREFIX}*"):
                remove_unheld(left, _put_back)
            # Engines read in it, maybe as other users.
            self._hold = make_held(self.parent / f"{_PREFIX}{secrets.token_hex(4)}", 0o755)
        return self._hold.folder

    def close(self) -> None:
        """Remove all that is in it."""
        hold, self._hold = self._hold, None
        if hold is not None:
            _put_back(hold.folder)
            hold.release()


def _put_back(workplace: Path) -> None:
    """Where a checkpoint was moved out of the way of one that did not come, move it back."""
    if (workplace / _OLD).exists():
        place = Path(os.readlink(workplace / _PLACE))
        if not place.exists():
            (workplace / _OLD).rename(place)


class CheckpointBuilder:
    """Writes a checkpoint into a temporary folder, one file per bucket; renamed when complete.

    Args:
        workplace: closed with it.
        folder: its path; an existing folder is replaced.
        copied: the checkpoint that the engines started from, for config and tokenizer.
        method: of the fingerprints; empty takes none.
    """

    def __init__(
        self, workplace: Workplace, folder: str | Path, copied: str | Path, method: str = ""
    ) -> None:
        self._method = method
        self._folder = Path(folder)
        self._workplace = workplace
        self._copied = Path(copied)
        self._num_files = self._num_bytes = 0
        self._files: dict[str, str] = {}

    @property
    def _new(self) -> Path:
        return self._workplace.folder / _NEW

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any]:
        from rollout.weights.tensors.bucket_bytes import fingerprints_of

        self._new.mkdir(exist_ok=True)
        self._num_files += 1
        name = f"bucket-{self._num_files:05d}.safetensors"
        with (self._new / name).open("wb") as file:
            _write(file, pairs)
        self._files |= {spec.name: name for spec in pairs.specs}
        self._num_bytes += sum(spec.num_bytes for spec in pairs.specs)
        return {"fingerprints": fingerprints_of(pairs, self._method)}

    def finish(self) -> Payload:
        """Complete the checkpoint; what the engines get after the last bucket."""
        for file in self._copied.glob("*"):
            if file.is_file() and not file.name.startswith(".") and not _holds_weights(file):
                with file.open("rb") as copied:
                    _write_file(self._new / file.name, copied)
        metadata = {"total_size": self._num_bytes}
        index = {"metadata": metadata, "weight_map": self._files}
        _write_file(self._new / INDEX_FILE, BytesIO(json.dumps(index).encode()))
        sync_folder(self._new)
        self._replace()
        return {"path": str(self._folder)}

    def _replace(self) -> None:
        """Move the checkpoint to its place, and one that is there out of its way."""
        old = self._workplace.folder / _OLD
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        if self._folder.exists():
            (self._workplace.folder / _PLACE).symlink_to(self._folder.absolute())
            self._folder.rename(old)
        self._new.rename(self._folder)
        for parent in self._folder.parents:
            sync_folder(parent)
            if parent == self._workplace.parent:
                break
        shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        self._workplace.close()


class EncodedBuilder:
    """Writes each bucket, encoded, into a folder of its own, which engines load at once.

    Args:
        workplace: closed with it.
    """

    def __init__(self, workplace: Workplace) -> None:
        self._workplace = workplace

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any]:
        path = self._workplace.folder / f"{index:05d}"
        path.mkdir()
        with (path / "bucket.safetensors").open("wb") as file:
            _write(file, pairs)
        return {"path": str(path)}

    def close(self) -> None:
        self._workplace.close()


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


def _write_file(path: Path, content: BinaryIO) -> None:
    """A file beside the tensors, on the disk when it returns."""
    with path.open("wb") as file:
        shutil.copyfileobj(content, file)
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
