"""The record of one stored version: everything needed to read and verify it.

Always true: a record names its run, its version and its write; it is read exactly as written, or
not at all: its first line is a digest of the rest.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engines.plain_json import WRONG_FORM, read_json
from engines.protocol.plain_text import describe
from engines.tensors.fingerprint import host_fingerprint
from rollout.core.errors import WeightMismatch, WeightsUnavailable
from rollout.weights.format.manifest import TensorSpec
from rollout.weights.store.layout.commit import Write
from rollout.weights.store.layout.placement import Segment, Unit, plan_segments

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """One version, distributed over all nodes.

    Attributes:
        write: two writes of one version are never mixed.
        kept: node -> indices of the units it keeps.
        fingerprints: of every tensor, or empty while it is being written.
    """

    run: str
    write: Write
    units: tuple[Unit, ...]
    kept: Mapping[str, tuple[int, ...]]
    segment_bytes: int
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    _planned: dict[str, tuple[Segment, ...]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def sealed(self, fingerprints: Mapping[str, str]) -> StoreRecord:
        """The same record when everything is written."""
        sealed = replace(self, fingerprints=fingerprints)
        sealed._planned.update(self._planned)
        return sealed

    def again(self, write: Write) -> StoreRecord:
        """Another write of the same tensors to the same nodes, not yet written."""
        record = replace(self, write=write, fingerprints={})
        record._planned.update(self._planned)
        return record

    def segments_of(self, node: str) -> tuple[Segment, ...]:
        """The files of one node; cached, because planning many small tensors takes time."""
        if node not in self._planned:
            kept = self.kept.get(node, ())
            self._planned[node] = plan_segments(self.units, kept, self.segment_bytes)
        return self._planned[node]

    def uncovered(self, nodes: Collection[str]) -> list[int]:
        """Indices of the units that none of ``nodes`` keeps."""
        covered = {unit for node in nodes for unit in self.kept.get(node, ())}
        return [index for index in range(len(self.units)) if index not in covered]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole model, without replicas."""
        return sum(unit.num_bytes for unit in self.units)


def dump(record: StoreRecord) -> bytes:
    """Encode a record for a file or a message."""
    body = json.dumps(
        {
            "format": _FORMAT,
            "run": record.run,
            "write": record.write.to_json(),
            "segment_bytes": record.segment_bytes,
            "kept": record.kept,
            "units": [
                [unit.name, [[spec.name, spec.dtype, spec.shape] for spec in unit.tensors]]
                for unit in record.units
            ],
            "fingerprints": record.fingerprints,
        }
    ).encode()
    return _digest(body).encode() + b"\n" + body


def load(data: bytes, *, where: str = "record") -> StoreRecord:
    """Read what ``dump`` wrote.

    Raises:
        WeightsUnavailable: it is damaged, truncated, or has another format.
    """
    digest, _, body = data.partition(b"\n")
    if digest.decode("ascii", "replace") != _digest(body):
        raise WeightsUnavailable(f"{where} is damaged: its digest does not match its contents")
    try:
        values = read_json(body)
        if values["format"] != _FORMAT:
            raise WeightsUnavailable(f"{where} has format {values['format']}, not {_FORMAT}")
        record = _record_of(values)
        _check(record)
    except (*WRONG_FORM, WeightMismatch) as error:
        raise WeightsUnavailable(f"{where} is damaged: {describe(error, with_type=True)}") from None
    return record


# More than any memory, and so few that JSON has sums of it as 64-bit numbers.
_MOST_BYTES = 1 << 60


def _check(record: StoreRecord) -> None:
    """Raises as ``WRONG_FORM`` has where nothing can be placed by it."""
    sizes = [unit.num_bytes for unit in record.units if unit.element_bytes]
    kept = [index for indices in record.kept.values() for index in indices]
    if not all(type(index) is int and 0 <= index < len(record.units) for index in kept):
        raise ValueError("a node keeps units that the record does not have")
    if not all(type(size) is int and size >= 0 for size in (*sizes, record.segment_bytes)):
        raise ValueError("it has a size that is no number of bytes")
    if max(sum(sizes), record.segment_bytes) > _MOST_BYTES:
        raise ValueError("it has more bytes than any store")


def _record_of(values: Mapping[str, Any]) -> StoreRecord:
    return StoreRecord(
        run=values["run"],
        write=Write(*values["write"]),
        units=tuple(
            Unit(name, tuple(TensorSpec(key, dtype, tuple(shape)) for key, dtype, shape in tensors))
            for name, tensors in values["units"]
        ),
        kept={node: tuple(kept) for node, kept in values["kept"].items()},
        segment_bytes=values["segment_bytes"],
        fingerprints=values["fingerprints"],
    )


def _digest(body: bytes) -> str:
    return host_fingerprint("record", "uint8", (len(body),), body)
