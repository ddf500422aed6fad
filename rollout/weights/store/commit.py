"""Which stored version counts, when nodes and writers may have died anywhere.

Always true: a version counts from the first node's commit on, and until a later one does; a node
commits only when every unit is sealed on some node; a version that no node has committed never
counts.  So there is at most one version that counts, and whoever asks the same nodes is told the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Write:
    """One write of one version; what was written later is greater.

    Attributes:
        number: counted up with each write of a run, since a version may be written again.
        write_id: tells two writes apart even where somebody miscounted.
    """

    number: int
    version: int
    write_id: str

    def __str__(self) -> str:
        return f"weight version {self.version} (write {self.number})"


@dataclass(frozen=True, slots=True)
class NodeState:
    """What one node keeps.

    Attributes:
        committed: what it was told counts; None before the first commit.
        sealed: writes it keeps its whole share of, the committed one among them.
    """

    committed: Write | None = None
    sealed: frozenset[Write] = frozenset()


def counting(states: Mapping[str, NodeState]) -> Write | None:
    """The write that counts; None if there is none."""
    return max((one.committed for one in states.values() if one.committed), default=None)


def to_promote(states: Mapping[str, NodeState]) -> list[str]:
    """Nodes that keep the write that counts and have not heard that it does."""
    write = counting(states)
    return [
        node
        for node, state in states.items()
        if write is not None and write in state.sealed and state.committed != write
    ]
