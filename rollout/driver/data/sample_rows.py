"""Sample groups as rows of plain values, one for each sample, which any library of tables saves.

Always true: groups that are made of rows equal the groups that the rows were made of, floats bit
for bit.  Groups keep their order.  Metadata is stored as JSON text: of the values of
``plain_values``, and no others.

    datasets.Dataset.from_list(sample_rows(groups)).to_parquet("step-3.parquet")
    groups = groups_of(datasets.Dataset.from_parquet("step-3.parquet"))
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from engines.protocol import FinishReason, VersionSpan
from engines.protocol.logprob_kind import read_kind
from rollout.core.errors import ConfigError
from rollout.core.samples import EngineSpan, Sample, SampleFailure, SampleGroup, SampleStatus
from rollout.driver.data.plain_values import NotPlainError, from_plain, to_plain

Row = dict[str, Any]

# Columns with the name and the value of a sample's field.
_LISTS = ("prompt_ids", "output_ids", "output_logprobs", "loss_mask")
_PLAIN_COLUMNS = ("text", "reward", "error", "traceback")


# Values whose form differs from row to row: text, because tables have one type for a column.
_AS_TEXT = ("finish_reason", "metadata")


def sample_rows(groups: Sequence[SampleGroup], rollout_id: int = 0) -> list[Row]:
    """The samples of a step.

    Args:
        groups: of the step.
        rollout_id: the step; rows of several steps may stand in one table.

    Raises:
        ConfigError: metadata of a sample has a value that cannot be saved.
        ValueError: a sample is damaged.
    """
    return [
        _row(rollout_id, index, group, sample)
        for index, group in enumerate(groups)
        for sample in group.samples
    ]


def groups_of(rows: Iterable[Mapping[str, Any]]) -> list[SampleGroup]:
    """The groups that ``sample_rows`` made these rows of, in order.

    Args:
        rows: a list, or a data set that was read from a file.

    Raises:
        ValueError: a row lacks a column.
    """
    found = []
    try:
        for _, members in groupby(rows, key=lambda row: (row["rollout_id"], row["group"])):
            of_group = list(members)
            first = of_group[0]
            metadata = from_plain(json.loads(first["group_metadata"]))
            samples = [_sample(row) for row in of_group]
            found.append(SampleGroup(int(first["prompt_index"]), samples, metadata))
    except KeyError as error:
        raise ValueError(f"no row of sample_rows: it has no column {error}") from None
    return found


def sample_values(sample: Sample) -> Row:
    """A sample as values of JSON, as long as its metadata is."""
    reason, experts = sample.finish_reason, sample.routed_experts
    return {
        **{name: getattr(sample, name) for name in (*_LISTS, *_PLAIN_COLUMNS)},
        "weight_versions": [asdict(span) for span in sample.weight_versions],
        "engines": [asdict(span) for span in sample.engines],
        "finish_reason": None if reason is None else asdict(reason),
        "status": sample.status.value,
        "failure": sample.failure and sample.failure.value,
        "logprob_kind": sample.logprob_kind and sample.logprob_kind.value,
        "routed_experts": None if experts is None else b64encode(experts).decode(),
        "sampling_mask": sample.sampling_mask,
        "metadata": sample.metadata,
    }


def sample_of(values: Mapping[str, Any]) -> Sample:
    """The sample that ``sample_values`` made these of; more values change nothing."""
    reason, experts = values["finish_reason"], values["routed_experts"]
    # Rows of older versions have none of these.
    failure, masks = values.get("failure"), values.get("sampling_mask")
    lists: dict[str, Any] = {name: list(values[name]) for name in _LISTS}
    return Sample(
        **lists,
        **{name: values[name] for name in _PLAIN_COLUMNS},
        logprob_kind=read_kind(values["logprob_kind"]),
        weight_versions=tuple(VersionSpan(**span) for span in values["weight_versions"]),
        engines=tuple(EngineSpan(**span) for span in values["engines"]),
        finish_reason=None if reason is None else FinishReason(**reason),
        status=SampleStatus(values["status"]),
        failure=None if failure is None else SampleFailure(failure),
        routed_experts=None if experts is None else b64decode(experts),
        sampling_mask=masks and [mask if mask is None else list(mask) for mask in masks],
        metadata=dict(values["metadata"]),
    )


def _row(rollout_id: int, index: int, group: SampleGroup, sample: Sample) -> Row:
    sample.check()
    values = sample_values(sample)
    return {
        "rollout_id": rollout_id,
        "group": index,
        "prompt_index": group.prompt_index,
        **values,
        **{name: _json(values[name], name) for name in _AS_TEXT},
        "group_metadata": _json(group.metadata, "metadata"),
    }


def _sample(row: Mapping[str, Any]) -> Sample:
    return sample_of({**row, **{name: from_plain(json.loads(row[name])) for name in _AS_TEXT}})


def _json(value: Any, name: str) -> str:
    try:
        return json.dumps(to_plain(value, name))
    except NotPlainError as error:
        raise ConfigError(f"a sample cannot be saved: {error}") from None
