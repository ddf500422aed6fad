"""Buckets written as safetensors files, into tmpfs slots or a folder on a shared disk.

Always true: a file that an engine is told of is whole; its fingerprints are of the bytes in it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from engines.embedded.fingerprint import as_bytes, bytes_fingerprint, dtype_name
from engines.fingerprint import host_fingerprint
from rollout.weights.layout import FileLayout, lay_out
from rollout.weights.manifest import TensorSpec
from rollout.weights.slots import Slot, SlotPool

Pairs = Sequence[tuple[str, torch.Tensor]]


def specs_of(pairs: Pairs) -> list[TensorSpec]:
    """Names, dtypes and shapes of tensors."""
    return [
        TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in pairs
    ]


def write_slot(pairs: Pairs, pool: SlotPool) -> tuple[Slot, FileLayout]:
    """One bucket into a slot of the pool.

    Raises:
        WeightsUnavailable: there is no room.
    """
    layout = lay_out(specs_of(pairs))
    slot = pool.take(layout.num_bytes)
    try:
        _fill(slot.view, layout, pairs)
    except BaseException:
        pool.give(slot)
        raise
    return slot, layout


def _fill(view: Any, layout: FileLayout, pairs: Pairs) -> None:
    if view[: len(layout.header)] != layout.header:
        view[: len(layout.header)] = layout.header
    flat = torch.frombuffer(view, dtype=torch.uint8)
    for name, tensor in pairs:
        begin, end = layout.offsets[name]
        flat[begin:end].copy_(as_bytes(tensor))


def fingerprints_of_slot(slot: Slot, layout: FileLayout, pairs: Pairs) -> dict[str, str]:
    """Of the bytes that are in the file, not of what should be in it."""
    found = {}
    with memoryview(slot.view) as view:
        for spec in specs_of(pairs):
            begin, end = layout.offsets[spec.name]
            with view[begin:end] as part:
                found[spec.name] = host_fingerprint(spec.name, spec.dtype, spec.shape, part)
    return found


def fingerprints_of(pairs: Pairs) -> dict[str, str]:
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
        layout = lay_out(specs_of(pairs))
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


class Fingerprinter:
    """Takes fingerprints in a thread of its own, while the next bucket is being copied."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._thread = ThreadPoolExecutor(1, "fingerprint")
        self._pending: list[Any] = []

    def of_slot(self, slot: Slot, layout: FileLayout, pairs: Iterable[Any]) -> None:
        if self._is_on:
            # Only names and shapes: the tensors must not live longer than their bucket.
            outlines = [(name, tensor.to("meta")) for name, tensor in pairs]
            self._pending.append(self._thread.submit(fingerprints_of_slot, slot, layout, outlines))

    def finish(self) -> Mapping[str, str]:
        """All that were asked for."""
        found: dict[str, str] = {}
        for one in self._pending:
            found.update(one.result())
        self.close()
        return found

    def close(self) -> None:
        self._thread.shutdown(wait=True)
