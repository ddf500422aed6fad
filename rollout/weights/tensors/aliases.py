"""Finds tensors of a push that lie in one memory, so that all of them have the values of the last.

A trainer that gathers into one buffer pushes the buffer's last values under each name, and their
fingerprints fit.  So two names have one memory only where the model ties them: where the tensors of
its checkpoint are equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch

from engines.tensors.safetensors_header import PlacedTensor, SafetensorsError, read_header
from rollout.core.errors import WeightMismatch
from rollout.weights.format.pushed_files import FileBytes
from rollout.weights.tensors.shard_gather import has_shards, is_shard

_READ_BYTES = 1 << 20
_Place = tuple[Path, PlacedTensor]


class Ties:
    """The tensors that a model's checkpoint has under several names, found by their values.

    Args:
        model_path: of the checkpoint; a folder without safetensors files ties nothing that is
            known.
    """

    def __init__(self, model_path: str | Path) -> None:
        self._path = Path(model_path)
        self._found: dict[tuple[str, str], bool | None] = {}

    def are_tied(self, name: str, other: str) -> bool | None:
        """Whether two names have equal tensors, or None if the checkpoint does not show it."""
        key = (name, other)
        if key not in self._found:
            self._found[key] = self._compared(name, other)
        return self._found[key]

    def _compared(self, name: str, other: str) -> bool | None:
        places = self._places
        if name not in places or other not in places:
            return None
        try:
            return _equal(places[name], places[other])
        except OSError:
            return None

    @cached_property
    def _places(self) -> Mapping[str, _Place]:
        found: dict[str, _Place] = {}
        for file in sorted(self._path.glob("*.safetensors")):
            try:
                with file.open("rb") as stream:
                    size = os.fstat(stream.fileno()).st_size
                    placed = read_header(file, stream.fileno()).placed(size)
            except (OSError, SafetensorsError):
                continue
            found |= {place.name: (file, place) for place in placed}
        return found


NO_TIES = Ties(os.devnull)
"""The ties of an unknown model."""


def _equal(first: _Place, second: _Place) -> bool:
    (file, place), (other_file, other) = first, second
    if (place.dtype, place.shape) != (other.dtype, other.shape):
        return False
    with file.open("rb") as stream, other_file.open("rb") as other_stream:
        pairs = zip(_pieces(stream, place), _pieces(other_stream, other), strict=True)
        return all(piece == other_piece for piece, other_piece in pairs)


def _pieces(stream: BinaryIO, place: PlacedTensor) -> Iterator[memoryview]:
    return FileBytes(stream.fileno(), place.offset, place.num_bytes).pieces(_READ_BYTES)


def check_apart(
    tensors: Sequence[Any], names_of: Callable[[int], Sequence[str]], ties: Ties
) -> None:
    """Check that no two tensors have one memory, if those of the checkpoint differ.

    All of them exist at once, so a trainer that ties what its model does not is believed where
    the checkpoint is not known.

    Args:
        names_of: the model's tensors that the one at this index becomes.

    Raises:
        WeightMismatch: two have; names both.
    """
    if not has_shards(tensors):
        places = list(map(torch.Tensor.data_ptr, tensors))
    else:
        places = [address_of(tensor) for tensor in tensors]
    if len({*places, 0}) == len(places) - places.count(0) + 1:
        return  # each has its own
    first: dict[object, int] = {}
    for index, (place, tensor) in enumerate(zip(places, tensors, strict=True)):
        if not place:
            continue
        before = first.setdefault((place, tensor.device), index)
        if before == index:
            continue
        for pair in zip(names_of(before), names_of(index), strict=False):
            if pair[0] != pair[1] and ties.are_tied(*pair) is False:
                raise _same_memory(*pair)


def address_of(tensor: Any) -> int:
    """Where a tensor, or this rank's part of it, begins; 0 for one without values."""
    local = tensor.to_local() if is_shard(tensor) else tensor
    return local.data_ptr() if local.numel() else 0


class UnsentTensors:
    """Tensors that were made one after the other and wait for the rest of their bucket.

    Args:
        ties: of the model.
    """

    def __init__(self, ties: Ties) -> None:
        self._ties = ties
        self._names: dict[object, str] = {}
        self._counters: list[tuple[str, torch.Tensor, int]] = []

    def add(self, name: str, tensor: Any) -> None:
        """Keep one until the bucket is taken.

        Raises:
            WeightMismatch: it lies in the memory of another one that the model does not tie to it.
        """
        self.check_new(tensor, lambda: [name])
        if place := address_of(tensor):
            self._names[place, tensor.device] = name
        if (counter := _changes_of(tensor)) is not None:
            self._counters.append((name, tensor, counter))

    def check_new(self, tensor: Any, names: Callable[[], Iterable[str]]) -> None:
        """Check a tensor that is not yet in the bucket.

        Args:
            names: of the model's tensors that it becomes; called if one of the bucket begins where
                this one does.

        Raises:
            WeightMismatch: it lies in the memory of one that is.
        """
        place = address_of(tensor)
        known = self._names.get((place, tensor.device)) if place else None
        if known is None:
            return
        for name in names():
            if known != name and not self._ties.are_tied(known, name):
                raise _same_memory(known, name)

    def take(self) -> None:
        """The bucket is taken, so that its tensors are sent.

        Raises:
            WeightMismatch: one was changed in place after it was made; names it.
        """
        for name, tensor, counter in self._counters:
            if _changes_of(tensor) != counter:
                raise WeightMismatch(
                    f"tensor {name!r} was changed after it was given to the push and before it was "
                    "sent; give a clone of each tensor, or a new buffer for each",
                    tensor=name,
                )
        self._names.clear()
        self._counters.clear()


def _changes_of(tensor: Any) -> int | None:
    """Torch's count of changes in place, or None where it keeps none, or not of this tensor alone.

    Views of one memory have one count, so a part of a buffer counts what is written into others.
    """
    if is_shard(tensor) or tensor.is_inference():
        return None
    return int(tensor._version) if tensor.untyped_storage().nbytes() == tensor.nbytes else None


def _same_memory(name: str, other: str) -> WeightMismatch:
    return WeightMismatch(
        f"tensors {name!r} and {other!r} are pushed from the same memory, and the model does not "
        "tie them, so one of them has the other's values: if a buffer was used again, give a clone "
        "of each; if the trainer ties them, push a clone of one",
        tensor=other,
    )
