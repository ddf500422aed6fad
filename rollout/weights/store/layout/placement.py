"""Units of storage, the nodes that keep them, and where they are in a node's segment files.

Always true: every tensor is in exactly one unit and is never split; the tensors of a unit have one
element size, so that consecutive units in a file are aligned; every unit is on as many different
nodes as there are replicas (or on all nodes, if there are fewer); the same arguments give the same
result, in the same order.

A segment is a valid safetensors file (https://huggingface.co/docs/safetensors): its header first,
then every tensor aligned to its element size, without holes.  So a unit, one expert of one layer or
a piece of a dense layer, is one range of bytes in one file, and any engine can load the file.  Its
metadata state that the file is never shortened, so that it may be mapped (``Files.allocate``
ensures that).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from engines.protocol import STAYS
from engines.tensors.safetensors_header import make_header
from rollout.config import StoreConfig
from rollout.weights.format.bucket_layout import split_by_size
from rollout.weights.format.manifest import Manifest, TensorSpec

_EXPERT = re.compile(r"^(.*\bexperts\.\d+)\.")
_LAYER = re.compile(r"^(.*?\.\d+)\.")
# The data of a segment begins on a new page.
_HEADER_ALIGNMENT = 4096
# A node keeps two versions: the current one, and the one that is being written.
_NUM_VERSIONS = 2


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that stay together.

    Attributes:
        name: the expert or layer, element size, and number of the unit there.
    """

    name: str
    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def element_bytes(self) -> int:
        return self.tensors[0].element_bytes


def make_units(manifest: Manifest, unit_bytes: int) -> tuple[Unit, ...]:
    """The units of a model: tensors of one expert or layer, up to about ``unit_bytes`` each.

    Raises:
        WeightMismatch: a tensor has a dtype that a safetensors file cannot hold.
    """
    owners: dict[tuple[str, int], list[TensorSpec]] = {}
    for tensor in manifest.tensors.values():
        key = _owner_of(tensor.name), tensor.element_bytes
        owners.setdefault(key, []).append(tensor)
    return tuple(
        Unit(f"{owner}/{element_bytes}/{number}", tuple(tensors[run]))
        for (owner, element_bytes), tensors in owners.items()
        for number, run in enumerate(
            split_by_size([tensor.num_bytes for tensor in tensors], unit_bytes)
        )
    )


def _owner_of(name: str) -> str:
    found = _EXPERT.match(name) or _LAYER.match(name)
    return found.group(1) if found else ""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment file.

    Attributes:
        file: its name.
        header: its first bytes.
        num_bytes: its length, including the header.
        units: index of each unit in it -> offset of its first byte in the file.
    """

    file: str
    header: bytes
    num_bytes: int
    units: dict[int, int]


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The bytes of one tensor in a segment."""

    tensor: TensorSpec
    unit: int
    file: str
    offset: int
    num_bytes: int


def plan_segments(
    units: Sequence[Unit], kept: Sequence[int], segment_bytes: int, stem: str = "seg"
) -> tuple[Segment, ...]:
    """Files for the units with these indices, each up to about ``segment_bytes``."""
    # Wide elements first, so that all tensors are aligned.
    order = sorted(kept, key=lambda index: (-units[index].element_bytes, index))
    runs = split_by_size([units[index].num_bytes for index in order], segment_bytes)
    return tuple(
        _segment(f"{stem}_{number:03d}.safetensors", units, order[run])
        for number, run in enumerate(runs)
    )


def _segment(file: str, units: Sequence[Unit], part: Sequence[int]) -> Segment:
    header, places = make_header(
        (
            (tensor.name, tensor.dtype, tensor.shape)
            for index in part
            for tensor in units[index].tensors
        ),
        metadata={"format": "pt", STAYS: "yes"},
        alignment=_HEADER_ALIGNMENT,
    )
    starts = {index: places[units[index].tensors[0].name][0] for index in part}
    num_bytes = len(header) + sum(units[index].num_bytes for index in part)
    return Segment(file, header, num_bytes, starts)


def tensor_ranges(units: Sequence[Unit], segments: Sequence[Segment]) -> Iterator[TensorRange]:
    """The range of every tensor in these segments, in the order of bytes."""
    for segment in segments:
        for index, offset in segment.units.items():
            for tensor in units[index].tensors:
                yield TensorRange(tensor, index, segment.file, offset, tensor.num_bytes)
                offset += tensor.num_bytes


def assign_replicas(
    units: Sequence[Unit], nodes: Collection[str], replicas: int
) -> dict[str, tuple[int, ...]]:
    """Node -> indices of its units. The largest unit goes first, to the nodes with fewest bytes."""
    load = dict.fromkeys(sorted(nodes), 0)
    kept: dict[str, list[int]] = {node: [] for node in load}
    by_size = sorted(range(len(units)), key=lambda index: (-units[index].num_bytes, index))
    for index in by_size:
        for node in sorted(load, key=lambda node: (load[node], node))[:replicas]:
            load[node] += units[index].num_bytes
            kept[node].append(index)
    return {node: tuple(sorted(indices)) for node, indices in kept.items()}


def node_bytes(manifest: Manifest, config: StoreConfig, num_nodes: int) -> int:
    """Bytes that the store always takes on the node with the largest share."""
    units = make_units(manifest, config.unit_bytes)
    kept = assign_replicas(units, [str(node) for node in range(num_nodes)], config.replicas)
    return _NUM_VERSIONS * max(
        sum(segment.num_bytes for segment in plan_segments(units, own, config.segment_bytes))
        for own in kept.values()
    )
