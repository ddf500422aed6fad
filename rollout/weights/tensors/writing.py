"""Buckets written as safetensors files, into tmpfs slots or a folder on a shared disk.

Always true: a file that an engine is told of is whole; its fingerprints are of the bytes in it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from engines.embedded.fingerprint import as_bytes, bytes_fingerprint
from rollout.weights.layout import lay_out
from rollout.weights.slots import Slot, SlotPool
from rollout.weights.tensors.copying import copy_tensors
from rollout.weights.tensors.sources import Pairs


def write_slot(
    pairs: Pairs, pool: SlotPool, *, fingerprint: bool
) -> tuple[Slot, Mapping[str, str]]:
    """One bucket into a slot of the pool, and the fingerprints of what is in it then.

    Raises:
        WeightsUnavailable: there is no room.
    """
    layout = pool.layouts.of(pairs.specs)
    slot = pool.take(layout.num_bytes)
    try:
        slot.write_header(layout.header)
        return slot, copy_tensors(
            slot.view, layout, pairs.specs, pairs.tensors, fingerprint=fingerprint
        )
    except BaseException:
        pool.give(slot)
        raise


def fingerprints_of(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Of tensors on any device, by their bytes."""
    return {name: bytes_fingerprint(name, tensor) for name, tensor in pairs}


class CheckpointWriter:
    """A folder that becomes a checkpoint of one version: written beside, renamed when whole.

    Args:
        folder: where it shall be; one that is there is replaced.
        copied: the checkpoint the engines started from, for its config and tokenizer.
    """

    def __init__(self, folder: str | Path, copied: str | Path) -> None:
        self.folder = Path(folder)
        self._beside = self.folder.with_name(f".{self.folder.name}.writing")
        shutil.rmtree(self._beside, ignore_errors=True)
        self._beside.mkdir(parents=True)
        self._copied = Path(copied)
        self._num_files = 0

    def add(self, pairs: Pairs) -> None:
        """One more file."""
        layout = lay_out(pairs.specs)
        self._num_files += 1
        with (self._beside / f"bucket-{self._num_files:05d}.safetensors").open("wb") as file:
            file.write(layout.header)
            for name, tensor in sorted(pairs, key=lambda pair: layout.offsets[pair[0]][0]):
                array: Any = as_bytes(tensor).cpu().numpy()
                assert file.tell() == layout.offsets[name][0]
                file.write(memoryview(array))
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> Path:
        """It is whole: give it its name."""
        for file in self._copied.glob("*"):
            if file.is_file() and not file.name.startswith(".") and not _holds_weights(file):
                shutil.copy2(file, self._beside / file.name)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._beside.rename(self.folder)
        return self.folder

    def drop(self) -> None:
        """It will not become whole."""
        shutil.rmtree(self._beside, ignore_errors=True)


def _holds_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(
        ".index.json"
    )
