"""What is written down about one stored version: everything needed to read and prove it.

Always true: a record names its run, version and the one write that made it; it is read back
exactly as written, or not at all, since its first line is a digest of the rest.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.errors import WeightsUnavailable
from rollout.weights.fingerprint import host_fingerprint
from rollout.weights.manifest import TensorSpec
from rollout.weights.store.commit import Write
from rollout.weights.store.layout import Segment, plan_segments
from rollout.weights.store.units import Unit

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Record:
    """One version as all nodes keep it together.

    Attributes:
        write: what made it: two writes of one version are never mixed.
        kept: node -> indices of the units it keeps.
        fingerprints: of every tensor; empty while it is still being written.
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

    def sealed(self, fingerprints: Mapping[str, str]) -> Record:
        """The same record, when all has been written."""
        sealed = replace(self, fingerprints=fingerprints)
        sealed._planned.update(self._planned)
        return sealed

    def again(self, write: Write) -> Record:
        """Another write of the same tensors to the same nodes, not yet written."""
        record = replace(self, write=write, fingerprints={})
        record._planned.update(self._planned)
        return record

    def segments_of(self, node: str) -> tuple[Segment, ...]:
        """The files of one node; planned once, for with many small tensors that takes a while."""
        if node not in self._planned:
            kept = self.kept.get(node, ())
            self._planned[node] = plan_segments(self.units, kept, self.segment_bytes)
        return self._planned[node]

    @property
    def version(self) -> int:
        """The weight version that was written."""
        return self.write.version

    def uncovered(self, nodes: Collection[str]) -> list[int]:
        """Indices of the units that none of ``nodes`` keeps."""
        covered = {unit for node in nodes for unit in self.kept.get(node, ())}
        return [index for index in range(len(self.units)) if index not in covered]

    @property
    def num_bytes(self) -> int:
        """Of the whole model, once."""
        return sum(unit.num_bytes for unit in self.units)


def dump(record: Record) -> bytes:
    """As it is written to a file or sent."""
    body = json.dumps(
        {
            "format": _FORMAT,
            "run": record.run,
            "write": [record.write.number, record.write.version, record.write.write_id],
            "segment_bytes": record.segment_bytes,
            "kept": record.kept,
            "units": [
                [unit.name, [[one.name, one.dtype, one.shape] for one in unit.tensors]]
                for unit in record.units
            ],
            "fingerprints": record.fingerprints,
        }
    ).encode()
    return _digest(body).encode() + b"\n" + body


def load(data: bytes, *, where: str = "record") -> Record:
    """Read what ``dump`` wrote.

    Raises:
        WeightsUnavailable: it is damaged, cut, or of another format.
    """
    digest, _, body = data.partition(b"\n")
    if digest.decode("ascii", "replace") != _digest(body):
        raise WeightsUnavailable(f"{where} is damaged: its digest does not match its contents")
    values: dict[str, Any] = json.loads(body)
    if values["format"] != _FORMAT:
        raise WeightsUnavailable(f"{where} has format {values['format']}, not {_FORMAT}")
    return Record(
        run=values["run"],
        write=Write(*values["write"]),
        units=tuple(
            Unit(name, tuple(TensorSpec(one, dtype, tuple(shape)) for one, dtype, shape in tensors))
            for name, tensors in values["units"]
        ),
        kept={node: tuple(kept) for node, kept in values["kept"].items()},
        segment_bytes=values["segment_bytes"],
        fingerprints=values["fingerprints"],
    )


def _digest(body: bytes) -> str:
    return host_fingerprint("record", "uint8", (len(body),), body)
