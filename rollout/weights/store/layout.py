"""Where each unit stands in a node's segment files.

Always true: a segment is a valid safetensors file (https://huggingface.co/docs/safetensors): its
header first, then every tensor aligned to its element size, without holes.  So a unit is one
range of bytes of one file, and any engine can load the file as it is.  Its metadata say that it is
never made shorter, so it may be read by mapping it (``Files.allocate`` keeps that).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engines.protocol import STAYS
from rollout.weights.manifest import TensorSpec
from rollout.weights.store.units import Unit, bytes_of, element_of

# The data begins on a page of its own.
_HEADER_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Segment:
    """One file.

    Attributes:
        file: its name.
        header: its first bytes.
        num_bytes: its length with the header.
        units: index of each unit in it -> offset of its first byte in the file.
    """

    file: str
    header: bytes
    num_bytes: int
    units: dict[int, int]


@dataclass(frozen=True, slots=True)
class Range:
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
    # Wide elements first: what follows them is then aligned whatever its own width.
    order = sorted(kept, key=lambda index: (-units[index].element_bytes, index))
    parts: list[list[int]] = []
    size = 0
    for index in order:
        if not parts or size + units[index].num_bytes > segment_bytes:
            parts.append([])
            size = 0
        parts[-1].append(index)
        size += units[index].num_bytes
    return tuple(
        _segment(f"{stem}_{number:03d}.safetensors", units, part)
        for number, part in enumerate(parts)
    )


def _segment(file: str, units: Sequence[Unit], part: Sequence[int]) -> Segment:
    entries: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt", STAYS: "yes"}}
    starts: dict[int, int] = {}
    position = 0
    for index in part:
        starts[index] = position
        for tensor in units[index].tensors:
            end = position + bytes_of(tensor)
            entries[tensor.name] = {
                "dtype": element_of(tensor)[0],
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return Segment(
        file,
        header,
        len(header) + position,
        {index: len(header) + start for index, start in starts.items()},
    )


def ranges(units: Sequence[Unit], segments: Sequence[Segment]) -> Iterator[Range]:
    """Every tensor in these segments, in the order of their bytes."""
    for segment in segments:
        for index, offset in segment.units.items():
            for tensor in units[index].tensors:
                size = bytes_of(tensor)
                yield Range(tensor, index, segment.file, offset, size)
                offset += size
