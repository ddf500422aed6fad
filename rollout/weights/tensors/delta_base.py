"""Copies of what the engines hold, in host memory, and what a push changes of them.

Always true: the copies have a version only while they are those of a push that has succeeded, so
that a delta never begins from what no engine has; a new push ends the version before it changes a
copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from engines.tensors.delta import (
    MOST_ELEMENTS,
    POSITION_BYTES,
    SUFFIX,
    Delta,
    bits_of,
    is_delta,
    make_delta,
)
from rollout.weights.format.encoding import BegunPush, EncodedPush
from rollout.weights.format.manifest import TensorSpec
from rollout.weights.tensors.sources import Pairs

# Positions are searched in blocks that fit into a core's cache.
_BLOCK = 1 << 18
_SAMPLE = 4096
# After so many pushes without copies, the density of the last one with them says nothing.
_MOST_SKIPPED = 16


@dataclass(frozen=True, slots=True, eq=False)
class DeltaPush:
    """One push that changes the copies.

    Attributes:
        base: the version that deltas begin from, or None if all tensors are sent whole.
        known: the model's tensors: those that are pushed in another dtype are sent whole.
    """

    version: int
    base: int | None
    known: Mapping[str, TensorSpec]


class DeltaBase:
    """What one rank has sent, as the engines hold it.

    Attributes:
        version: of the copies, or None while they are of no version.
        num_changed: elements that the last push has changed, of ``num_compared``.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.num_changed = self.num_compared = 0
        self._num_skipped = 0
        self._push: DeltaPush | None = None
        self._copies: dict[str, tuple[TensorSpec, torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Size of all copies."""
        return sum(copy.nbytes for _, copy in self._copies.values())

    @property
    def density(self) -> float | None:
        """The share of elements that the last push has changed, or None if none were compared."""
        return self.num_changed / self.num_compared if self.num_compared else None

    def begin(self, push: DeltaPush) -> None:
        """A push begins; one that has begun before it changes no copies any more."""
        self._push, self.version = push, None
        self.num_changed = self.num_compared = self._num_skipped = 0

    def succeed(self, push: DeltaPush) -> None:
        """The engines hold this push."""
        if self._push is push:
            self.version = push.version

    def drop(self) -> None:
        """Free the copies: a push does without."""
        self._push = self.version = None
        self._copies.clear()
        self._num_skipped += 1
        if self._num_skipped >= _MOST_SKIPPED:
            self.num_changed = self.num_compared = self._num_skipped = 0

    def take(self, push: DeltaPush, pairs: Pairs) -> Pairs:
        """Copy a bucket; returns what the engines need of it, at least one tensor.

        That is a delta of each tensor that has changed, the whole of one that a delta would make
        larger, and nothing of one that is equal.
        """
        if self._push is not push:
            return pairs
        found: list[tuple[str, torch.Tensor]] = []
        for spec, tensor in zip(pairs.specs, pairs.tensors, strict=True):
            positions = self._changed(push, spec, tensor)
            if positions is None:
                found.append((spec.name, tensor))
            elif len(positions):
                found.append(self._delta(push, spec, positions))
        if not found:
            smallest = min(pairs.specs, key=lambda spec: spec.num_bytes)
            found.append(self._delta(push, smallest, np.empty(0, np.int32)))
        return pairs if push.base is None else Pairs.of(found)

    def _delta(
        self, push: DeltaPush, spec: TensorSpec, positions: np.ndarray
    ) -> tuple[str, torch.Tensor]:
        at = torch.from_numpy(positions)
        head = Delta(spec.name, spec.dtype, spec.shape, str(push.base), len(at))
        values = self._copies[spec.name][1][at.long()]
        return spec.name + SUFFIX, make_delta(head, at, values)

    def _changed(
        self, push: DeltaPush, spec: TensorSpec, tensor: torch.Tensor
    ) -> np.ndarray | None:
        """Update the copy; returns where it has changed, or None if all of it is sent."""
        if spec != push.known.get(spec.name, spec) or tensor.numel() >= MOST_ELEMENTS:
            self._copies.pop(spec.name, None)
            return None
        bits = bits_of(tensor).cpu()
        last, copy = self._copies.get(spec.name, (None, bits))
        if last != spec:
            self._copies[spec.name] = spec, bits.clone()
            return None
        own, new = copy.numpy(), bits.numpy()
        positions = None if push.base is None else self._positions(own, new)
        if positions is None:
            copy.copy_(bits)
        else:
            own[positions] = new[positions]
        return positions

    def _positions(self, own: np.ndarray, new: np.ndarray) -> np.ndarray | None:
        """Where two versions differ, or None if so many differ that a delta would be larger."""
        most = own.nbytes / (POSITION_BYTES + own.itemsize)
        sample = slice(None, None, max(1, own.size // _SAMPLE))
        num_sampled = int(np.count_nonzero(own[sample] != new[sample]))
        share = num_sampled / max(1, own[sample].size)
        self.num_compared += own.size
        if share * own.size > most:
            self.num_changed += round(share * own.size)
            return None
        blocks = range(0, own.size, _BLOCK)
        found = [
            (np.flatnonzero(own[at : at + _BLOCK] != new[at : at + _BLOCK]) + at).astype(np.int32)
            for at in blocks
        ]
        positions = np.concatenate(found) if found else np.empty(0, np.int32)
        self.num_changed += len(positions)
        return positions if len(positions) <= most else None


class DeltaEncoder:
    """One push that changes the copies: an ``Encoder``.

    Attributes:
        stored: its deltas, if it is of deltas and they are kept.
    """

    def __init__(self, copies: DeltaBase, push: BegunPush) -> None:
        base = None if push.is_whole else copies.version
        self.stored = EncodedPush(base, {}) if push.is_stored and base is not None else None
        self._copies = copies
        self._push = DeltaPush(push.version, base, push.model)
        copies.begin(self._push)

    @property
    def density(self) -> float | None:
        return self._copies.density

    def encode(self, pairs: Pairs) -> Pairs:
        """See ``DeltaBase.take``."""
        changes = self._copies.take(self._push, pairs)
        if self.stored is not None:
            self.stored.tensors.update(deltas_in(changes))
        return changes

    def succeed(self) -> None:
        """The engines hold what the copies are of."""
        self._copies.succeed(self._push)


def deltas_in(changes: Pairs) -> dict[str, bytes | None]:
    """Tensor -> its delta in what ``DeltaBase.take`` made of a bucket, or None for a whole one."""
    return {
        name.removesuffix(SUFFIX): content.numpy().tobytes() if is_delta(name) else None
        for name, content in changes
    }
