"""Which stored version is current, when nodes and writers may crash at any point.

Always true: a version is current from the first node's commit until a later version's; a node
commits only when every unit is sealed on some node; a version that no node has committed is never
current.  So at most one version is current, and the same node states give the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Write:
    """One write of one version; a later write is greater.

    Attributes:
        number: increases with each write of a run; a version may be written again.
        write_id: unique, in case two writers use the same number.
    """

    number: int
    version: int
    write_id: str

    def to_json(self) -> list[int | str]:
        """The arguments of a ``Write``, as files and messages have them."""
        return [self.number, self.version, self.write_id]

    def __str__(self) -> str:
        return f"weight version {self.version} (write {self.number})"


@dataclass(frozen=True, slots=True)
class NodeState:
    """The state of one node.

    Attributes:
        committed: the last committed write, or None before the first commit.
        sealed: writes of which it keeps its whole share, including the committed one.
    """

    committed: Write | None = None
    sealed: frozenset[Write] = frozenset()


def current_write(states: Mapping[str, NodeState]) -> Write | None:
    """The current write, or None before the first commit."""
    return max((state.committed for state in states.values() if state.committed), default=None)


def nodes_to_commit(states: Mapping[str, NodeState]) -> list[str]:
    """Nodes that keep the current write and have not committed it yet."""
    write = current_write(states)
    return [
        node
        for node, state in states.items()
        if write is not None and write in state.sealed and state.committed != write
    ]
