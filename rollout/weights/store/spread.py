"""Which node keeps which units.

Always true: every unit is on as many different nodes as there are replicas (or on all nodes, if
there are fewer), none is left over, and the same question always has the same answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rollout.weights.store.units import Unit


def spread(
    units: Sequence[Unit], nodes: Collection[str], replicas: int
) -> dict[str, tuple[int, ...]]:
    """Node -> indices of the units it keeps; the largest are given out first, to who has least."""
    load = dict.fromkeys(sorted(nodes), 0)
    kept: dict[str, list[int]] = {node: [] for node in load}
    by_size = sorted(range(len(units)), key=lambda index: (-units[index].num_bytes, index))
    for index in by_size:
        for node in sorted(load, key=lambda one: (load[one], one))[:replicas]:
            load[node] += units[index].num_bytes
            kept[node].append(index)
    return {node: tuple(sorted(indices)) for node, indices in kept.items()}


def kept_bytes(units: Sequence[Unit], kept: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Node -> bytes of one copy of all that it keeps."""
    return {node: sum(units[index].num_bytes for index in own) for node, own in kept.items()}
