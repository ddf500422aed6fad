"""Finds stacked experts of a trainer whose checkpoint has a tensor for each expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from engines.tensors.stacked_experts import first_expert_of, split_experts, stacked_name
from rollout.weights.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ExpertSplitter:
    """A name map that splits stacked experts; all other tensors pass.

    Attributes:
        stacked: names of the stacked tensors.
    """

    stacked: frozenset[str]

    def __call__(self, name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        if name in self.stacked:
            yield from split_experts(name, tensor)
        else:
            yield name, tensor


def splitter_of(names: Iterable[str], expected: Manifest | None) -> ExpertSplitter | None:
    """The name map for these tensors of a trainer, or None if none of them is to be split."""
    if expected is None:
        return None
    stacked = frozenset(name for name in names if is_stacked(name, expected))
    return ExpertSplitter(stacked) if stacked else None


def is_stacked(name: str, expected: Manifest) -> bool:
    """Whether the checkpoint has a tensor for each expert of this one."""
    known = expected.tensors
    return name not in known and first_expert_of(name) in known


def stacked_bytes(checkpoint: Manifest) -> Collection[int]:
    """Size of each stacked tensor that a trainer may hold in place of single experts."""
    found: Counter[str] = Counter()
    for name, spec in checkpoint.tensors.items():
        if stacked := stacked_name(name):
            found[stacked] += spec.num_bytes
    return found.values()
