"""A checkpoint on a shared disk is there whole or not at all, whenever its trainer was killed."""

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from engines.fake import FakeEngine
from rollout.core.errors import RolloutError
from rollout.core.types import EngineSlot
from rollout.weights.routes.disk import CheckpointBuilder, Workplace
from rollout.weights.store.weight_source import DiskSource, Restored
from rollout.weights.tensors.sources import Pairs
from tests.support.line_kills import killed_at_each_line

pytestmark = pytest.mark.embedded
NAMES = ("a", "b")
SLOT: Any = EngineSlot


def builder(folder: Path) -> CheckpointBuilder:
    model = folder.parent / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return CheckpointBuilder(Workplace(folder), folder / "step-7", model)


def write(folder: Path, value: float) -> None:
    """A push of version 7, one bucket per tensor, each filled with the value."""
    made = builder(folder)
    try:
        for index, name in enumerate(NAMES):
            made.make(index, Pairs.of([(name, torch.full((64,), value))]))
        made.finish()
    finally:
        made.close()


class Engine(FakeEngine):
    """Reads the files of what it loads."""

    loaded: tuple[float, ...] = ()

    async def update_weights_from_disk(self, model_path: str, **more: Any) -> None:
        self.loaded = values(Path(model_path))


def values(checkpoint: Path) -> tuple[float, ...]:
    files = sorted(checkpoint.glob("*.safetensors"))
    assert len(files) == len(NAMES)
    found = [
        torch.frombuffer(bytearray(one.read_bytes()[-256:]), dtype=torch.float32) for one in files
    ]
    assert all(len(one.unique()) == 1 for one in found)
    return tuple(one[0].item() for one in found)


def restored(folder: Path, engine: Engine | None = None) -> tuple[float, ...] | None:
    """What an engine gets of version 7; None if it gets nothing."""
    engine = engine or Engine("main-0")
    source = DiskSource(str(folder / "step-{version}"))
    found = asyncio.run(source.restore(engine, 7, SLOT))
    assert (found == Restored()) == bool(engine.loaded)
    return engine.loaded if found else None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_it_can_be_restored_and_nothing_else_is_beside_it(folder: Path) -> None:
    for value in (1.0, 2.0):
        write(folder, value)
        assert restored(folder) == (value, value)
        assert os.listdir(folder) == ["step-7"]
    index = json.loads((folder / "step-7" / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == {
        "a": "bucket-00001.safetensors",
        "b": "bucket-00002.safetensors",
    }
    assert index["metadata"] == {"total_size": 2 * 4 * 64}


@pytest.mark.parametrize("name", ["make", "finish", "_replace", "close"])
def test_a_kill_at_any_line_loses_no_version_and_shows_no_half_of_one(
    folder: Path, name: str
) -> None:
    function: Any = getattr(CheckpointBuilder, name)
    num_absent = 0
    write(folder, 1.0)
    for _ in killed_at_each_line(function, lambda: write(folder, 2.0)):
        found = restored(folder)
        assert found in ((1.0, 1.0), (2.0, 2.0), None)
        num_absent += found is None
        place = Workplace(folder)  # the next push, of another version
        assert place.folder.exists()
        place.close()
        assert os.listdir(folder) == ["step-7"]
        assert restored(folder) in ((1.0, 1.0), (2.0, 2.0))
        shutil.rmtree(folder)
        write(folder, 1.0)
    assert num_absent == (name == "_replace"), "only between the two renames"


def test_a_push_that_fails_at_the_end_leaves_the_checkpoint_that_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 1.0)
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError("disk quota exceeded")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="disk quota"):
        write(folder, 2.0)
    assert restored(folder) == (1.0, 1.0)
    assert os.listdir(folder) == ["step-7"]


def test_its_files_are_on_the_disk_before_its_name_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure keeps what was synced, and may keep any name that was not."""
    synced: set[int] = set()
    sync, rename = os.fsync, Path.rename

    def synced_too(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def checked(path: Path, target: Path) -> Path:
        names = [path, *path.iterdir()]
        assert [one.name for one in names if one.stat().st_ino not in synced] == []
        assert len(names) == len(NAMES) + 3
        synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced_too)
    monkeypatch.setattr(Path, "rename", checked)
    write(folder, 1.0)
    assert folder.stat().st_ino in synced


@pytest.mark.parametrize("is_living", [True, False])
def test_a_push_that_lives_keeps_what_it_has_and_one_that_ended_does_not(
    folder: Path, is_living: bool
) -> None:
    def begin() -> CheckpointBuilder:
        other = builder(folder)
        other.make(0, Pairs.of([("a", torch.zeros(64))]))
        return other

    if is_living:
        other = begin()
    elif not (child := os.fork()):
        other = begin()
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.waitpid(child, 0)
    (theirs,) = folder.iterdir()
    write(folder, 1.0)
    assert theirs.exists() == is_living
    if is_living:
        other.close()


def test_what_somebody_else_has_there_is_left_alone(folder: Path) -> None:
    for name in (".rollout-push-notes", ".step-6.writing", "step-6.encoded", "step-6"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").touch()
    before = set(os.listdir(folder))
    write(folder, 1.0)
    assert set(os.listdir(folder)) == {*before, "step-7"}


def cut(checkpoint: Path) -> str:
    os.truncate(checkpoint / "bucket-00002.safetensors", 300)
    return "bucket-00002.safetensors has 300 bytes of"


def lose(checkpoint: Path) -> str:
    (checkpoint / "bucket-00001.safetensors").unlink()
    return "names 1 files that are not there, first bucket-00001.safetensors"


def empty(checkpoint: Path) -> str:
    (checkpoint / "bucket-00001.safetensors").write_bytes(b"")
    return "bucket-00001.safetensors is not a safetensors file: it has only 0 bytes"


def garble(checkpoint: Path) -> str:
    (checkpoint / "model.safetensors.index.json").write_bytes(b"")
    return "is not a whole checkpoint"


@pytest.mark.parametrize("damage", [cut, lose, empty, garble])
def test_what_is_not_whole_is_refused_in_words_and_no_engine_loads_it(
    folder: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, 1.0)
    expected = damage(folder / "step-7")
    engine = Engine("main-0")
    assert restored(folder, engine) is None
    assert engine.loaded == ()
    assert "weight version 7 is not loaded from disk" in caplog.text
    assert expected in caplog.text


def test_a_refusal_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, 1.0)
    lose(folder / "step-7")
    source = DiskSource(str(folder / "step-{version}"))
    for _ in range(3):
        assert asyncio.run(source.restore(Engine("main-0"), 7, SLOT)) is None
    assert caplog.text.count("is not loaded from disk") == 1


def test_one_that_is_replaced_while_an_engine_loads_it_is_no_version(folder: Path) -> None:
    write(folder, 1.0)

    class Slow(Engine):
        async def update_weights_from_disk(self, model_path: str, **more: Any) -> None:
            write(folder, 2.0)

    with pytest.raises(RolloutError, match="step-7 was replaced while the engine loaded it"):
        restored(folder, Slow("main-0"))
