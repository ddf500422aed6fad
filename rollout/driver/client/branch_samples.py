"""The turns of a session as samples for training (pure).

Always true: each token that an engine generated has loss mask 1 in exactly one sample.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engines.protocol import FinishReason, VersionSpan
from engines.protocol.logprob_kind import LogprobKind, joined, read_kind
from rollout.core.samples import Sample, SampleStatus

Turn = Mapping[str, Any]
_STATUS = {"length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}


def branch_samples(session_id: str, turns: Sequence[Turn]) -> list[Sample]:
    """A sample for each turn that no other turn continues, in order.

    The prompt is that of the branch's first turn.  All later tokens are its output: those of
    users, tools and the template with mask 0, and so are answers that an earlier sample has.

    Args:
        turns: as the router lists them, so that a turn stands at its own number.
    """
    continued = {turn["parent"] for turn in turns}
    counted: set[int] = set()
    leaves = [turn for turn in turns if turn["turn"] not in continued]
    return [_sample(session_id, _path(turns, leaf), counted) for leaf in leaves]


def _path(turns: Sequence[Turn], leaf: Turn) -> list[Turn]:
    """From the first turn to ``leaf``."""
    path = [leaf]
    while (parent := path[-1]["parent"]) is not None:
        path.append(turns[parent])
    return path[::-1]


def _sample(session_id: str, path: Sequence[Turn], counted: set[int]) -> Sample:
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    kind: LogprobKind | None = None
    spans: list[VersionSpan] = []
    for place, turn in enumerate(path):
        if place:
            new = turn["prompt_ids"]
            ids += new
            logprobs += [0.0] * len(new)
            mask += [0] * len(new)
        is_new = turn["turn"] not in counted
        counted.add(turn["turn"])
        kind = joined(kind, read_kind(turn.get("logprob_kind")))
        spans += _spans(turn, len(ids))
        ids += turn["output_ids"]
        logprobs += [_number(logprob) if is_new else 0.0 for logprob in turn["output_logprobs"]]
        mask += [int(is_new)] * len(turn["output_ids"])
    leaf = path[-1]
    images = [image for turn in path for image in turn.get("images") or ()]
    finish = FinishReason(
        leaf["finish_reason"]["type"],
        leaf["finish_reason"].get("matched"),
        leaf["finish_reason"].get("message") or "",
    )
    return Sample(
        list(path[0]["prompt_ids"]),
        ids,
        logprobs,
        leaf["text"],
        tuple(spans),
        finish,
        _STATUS.get(finish.kind, SampleStatus.COMPLETED),
        metadata={
            "session_id": session_id,
            "turns": [turn["turn"] for turn in path],
            "drift": [turn["drift"] for turn in path],
            **({"images": images} if images else {}),
        },
        loss_mask=mask,
        routed_experts=_experts(path),
        logprob_kind=kind,
    )


def _experts(path: Sequence[Turn]) -> bytes | None:
    """The experts of all turns, or None if one has none."""
    parts: list[str | None] = [turn["routed_experts"] for turn in path]
    known = [base64.b64decode(part) for part in parts if part is not None]
    return b"".join(known) if len(known) == len(parts) else None


def _spans(turn: Turn, begin: int) -> Iterator[VersionSpan]:
    for span in turn["weight_versions"]:
        yield VersionSpan(str(span["version"]), begin + span["start"], begin + span["end"])


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON has no NaN
