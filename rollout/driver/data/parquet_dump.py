"""Sample groups in Parquet files, to train on later without engines.

Always true: groups that are read equal the groups that were written, floats bit for bit.  One row
is one sample; groups keep their order.  Metadata is stored as JSON, so it must be JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from engines.protocol import FinishReason, VersionSpan
from engines.protocol.logprob_kind import read_kind
from rollout.core.arguments import Count, checked
from rollout.core.errors import ConfigError, RolloutError
from rollout.core.optional_deps import optional_import
from rollout.core.samples import EngineSpan, Sample, SampleGroup, SampleStatus

_READ_ROWS = 1024
_NOT_IN_ALL = ("logprob_kind",)
"""Columns that dumps of earlier versions lack."""
# Columns with the name and the value of a sample's field.
_PLAIN_COLUMNS = (
    *("prompt_ids", "output_ids", "output_logprobs", "loss_mask"),
    *("text", "reward", "error", "traceback", "routed_experts"),
)


def to_arrow(rollout_id: int, groups: Sequence[SampleGroup]) -> Any:
    """The groups as a ``pyarrow.Table``, one row per sample.

    Raises:
        ConfigError: metadata of a sample is not JSON, or pyarrow is missing.
    """
    pa = _pyarrow()
    rows = [
        _row(rollout_id, index, group, sample)
        for index, group in enumerate(groups)
        for sample in group.samples
    ]
    return pa.Table.from_pylist(rows, schema=_schema(pa))


def from_arrow(table: Any) -> list[SampleGroup]:
    """The groups of a table that ``to_arrow`` made."""
    return list(_groups(iter(table.to_pylist())))


@checked
def save_groups(path: Path | str, rollout_id: Count, groups: Sequence[SampleGroup]) -> None:
    """Write one rollout.

    Args:
        path: of the new file.
        rollout_id: the step, from 0.
        groups: of the step.

    Raises:
        ConfigError: an argument is wrong, metadata of a sample is not JSON, the file cannot be
            written, or pyarrow is missing.
    """
    table = to_arrow(rollout_id, groups)
    from pyarrow import parquet

    try:
        parquet.write_table(table, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", value=str(path)) from None


def load_groups(path: Path | str) -> list[SampleGroup]:
    """All groups of a file, in order.

    Args:
        path: of a file that ``save_groups`` wrote.

    Raises:
        ConfigError: there is no such file, it is no dump, or pyarrow is missing.
    """
    return list(_groups(_rows(path)))


class Replay:
    """Rollouts from dumps, instead of a driver: ``--replay dump.parquet``.

    Args:
        paths: files with one or more rollouts; a directory means its ``*.parquet`` files, sorted
            by name.

    Raises:
        ConfigError: there is no such file, or it is no dump.
    """

    def __init__(self, *paths: Path | str) -> None:
        self._rollouts: dict[int, list[SampleGroup]] = {}
        for path in paths:
            for file in _files(Path(path)):
                rows = _rows(file)
                for rollout_id, part in groupby(rows, key=lambda row: int(row["rollout_id"])):
                    self._rollouts.setdefault(rollout_id, []).extend(_groups(part))

    @property
    def rollout_ids(self) -> list[int]:
        """Of all rollouts in the files, ascending."""
        return sorted(self._rollouts)

    def rollout(self, rollout_id: int) -> list[SampleGroup]:
        """The groups of this rollout.

        Args:
            rollout_id: one of ``rollout_ids``.

        Raises:
            RolloutError: the dumps do not have it.
        """
        if rollout_id not in self._rollouts:
            ids = self.rollout_ids
            found = f"{len(ids)}, from {ids[0]} to {ids[-1]}" if ids else "none"
            raise RolloutError(f"no rollout {rollout_id} in the dumps; there are {found}")
        return self._rollouts[rollout_id]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.parquet"))
    if not found:
        raise ConfigError(f"{path} has no *.parquet file", setting="replay", value=str(path))
    return found


def _row(rollout_id: int, index: int, group: SampleGroup, sample: Sample) -> dict[str, Any]:
    sample.check()
    reason = sample.finish_reason
    matched = None if reason is None or reason.matched is None else json.dumps(reason.matched)
    return {
        "rollout_id": rollout_id,
        "group": index,
        "prompt_index": group.prompt_index,
        **{name: getattr(sample, name) for name in _PLAIN_COLUMNS},
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end}
            for span in sample.weight_versions
        ],
        "engines": [
            {"engine_id": span.engine_id, "start": span.start, "end": span.end}
            for span in sample.engines
        ],
        "finish_kind": None if reason is None else reason.kind,
        "finish_matched": matched,
        "finish_message": None if reason is None else reason.message,
        "status": sample.status.value,
        "logprob_kind": sample.logprob_kind and sample.logprob_kind.value,
        "metadata": _json(sample.metadata),
        "group_metadata": _json(group.metadata),
    }


def _groups(rows: Iterator[Mapping[str, Any]]) -> Iterator[SampleGroup]:
    for _, rows_of_group in groupby(rows, key=lambda row: (row["rollout_id"], row["group"])):
        group_rows = list(rows_of_group)
        first = group_rows[0]
        yield SampleGroup(
            int(first["prompt_index"]),
            [_sample(row) for row in group_rows],
            json.loads(first["group_metadata"]),
        )


def _sample(row: Mapping[str, Any]) -> Sample:
    reason = None
    if row["finish_kind"] is not None:
        matched = None if row["finish_matched"] is None else json.loads(row["finish_matched"])
        reason = FinishReason(row["finish_kind"], matched, row["finish_message"])
    return Sample(
        **{name: row[name] for name in _PLAIN_COLUMNS},
        logprob_kind=read_kind(row.get("logprob_kind")),
        weight_versions=tuple(VersionSpan(**span) for span in row["weight_versions"]),
        engines=tuple(EngineSpan(**span) for span in row["engines"]),
        finish_reason=reason,
        status=SampleStatus(row["status"]),
        metadata=json.loads(row["metadata"]),
    )


def _json(metadata: Mapping[str, Any]) -> str:
    try:
        return json.dumps(metadata)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metadata of a dumped sample must be JSON: {error}") from None


def _rows(path: Path | str) -> Iterator[Mapping[str, Any]]:
    pa = _pyarrow()
    from pyarrow import parquet

    if not Path(path).is_file():
        raise ConfigError(f"no such dump: {path}", setting="replay", value=str(path))
    try:
        file = parquet.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a Parquet file: {error}") from None
    with file:
        needed = [name for name in _schema(pa).names if name not in _NOT_IN_ALL]
        missing = [name for name in needed if name not in file.schema_arrow.names]
        if missing:
            raise ConfigError(f"{path} is not a dump of samples: no columns {', '.join(missing)}")
        for batch in file.iter_batches(_READ_ROWS):
            yield from batch.to_pylist()


def _schema(pa: Any) -> Any:
    ids = pa.list_(pa.int64())
    text, number = pa.string(), pa.int64()
    place = [("start", number), ("end", number)]
    return pa.schema(
        [
            ("rollout_id", number),
            ("group", number),
            ("prompt_index", number),
            ("prompt_ids", ids),
            ("output_ids", ids),
            ("output_logprobs", pa.list_(pa.float64())),
            ("loss_mask", pa.list_(pa.int8())),
            ("text", text),
            ("weight_versions", pa.list_(pa.struct([("version", text), *place]))),
            ("engines", pa.list_(pa.struct([("engine_id", text), *place]))),
            ("finish_kind", text),
            ("finish_matched", text),
            ("finish_message", text),
            ("status", text),
            ("reward", pa.float64()),
            ("error", text),
            ("traceback", text),
            ("routed_experts", pa.binary()),
            ("metadata", text),
            ("group_metadata", text),
            ("logprob_kind", text),
        ]
    )


def _pyarrow() -> Any:
    with optional_import("data", "Parquet needs pyarrow, which is not installed"):
        import pyarrow
    return pyarrow
