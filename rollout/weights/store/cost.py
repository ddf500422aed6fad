"""What the store takes of each node's memory."""

from __future__ import annotations

from rollout.config import StoreConfig
from rollout.weights.manifest import Manifest
from rollout.weights.store.layout import plan_segments
from rollout.weights.store.spread import spread
from rollout.weights.store.units import make_units

_SLOTS = 2


def node_bytes(manifest: Manifest, config: StoreConfig, num_nodes: int) -> int:
    """Of the node that keeps most, all the time: two versions of its share."""
    units = make_units(manifest, config.unit_bytes)
    kept = spread(units, [str(node) for node in range(num_nodes)], config.replicas)
    return _SLOTS * max(
        sum(segment.num_bytes for segment in plan_segments(units, own, config.segment_bytes))
        for own in kept.values()
    )


def restore_bytes(manifest: Manifest, config: StoreConfig, num_nodes: int) -> int:
    """Of a node more, while an engine is restored there: what other nodes keep."""
    whole = node_bytes(manifest, config, 1) // _SLOTS
    return max(0, whole - node_bytes(manifest, config, num_nodes) // _SLOTS)
