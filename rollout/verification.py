"""Do the engines hold the weights they should?  Decided from their fingerprints.

Always true: an engine is passed only on evidence.  What must not have changed is compared with
the engine's own record, which alone catches weights that came back from a release as garbage;
what did change is compared with the other engines of the group, which got the same push.  Where
they disagree without a majority nobody is passed, for nobody can tell who is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.protocol import WeightsReport
from rollout.canary import Canary

ADAPTER_PREFIX = "lora:"
"""What adapters' tensors are called among all weights: no base tensor is."""
ALL_TENSORS = frozenset({"*"})
"""What a full push changed."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one engine's weights.

    Attributes:
        report: its fingerprints now.
        record: its fingerprints when it was last proved; None where none were taken.
        changed: checkpoint names pushed since the record; ``ALL_TENSORS`` for a full push.
        sent: fingerprints of what it was given, as the trainer took them, of tensors that it
            holds in the same form and under the same name.
        adapter: name of the adapter it was given; empty for none.
    """

    report: WeightsReport
    record: WeightsReport | None = None
    changed: frozenset[str] = frozenset()
    sent: Mapping[str, str] = field(default_factory=dict)
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """What one engine has shown of its weights.

    Attributes:
        by: ``version``, ``fingerprint`` or ``canary``.
    """

    by: str
    report: WeightsReport | None = None
    canaries: Mapping[str, Canary] = field(default_factory=dict)


def judge(evidence: Mapping[str, Evidence]) -> dict[str, str]:
    """Engine id -> why its weights are not proved; engines that are proved are not in it."""
    wrong = {}
    for engine_id, one in evidence.items():
        tensor = _lost(one)
        if tensor:
            wrong[engine_id] = f"tensor {tensor!r} is not what it was before, and was not pushed"
            continue
        tensor = _not_as_sent(one)
        if tensor:
            wrong[engine_id] = f"tensor {tensor!r} is not what the trainer sent"
    left = {engine_id: one.report for engine_id, one in evidence.items() if engine_id not in wrong}
    return wrong | _outvoted(left)


def left_open(one: Evidence, num_others: int) -> str:
    """What fingerprints could not tell of an engine that has passed; empty if nothing is left.

    Args:
        num_others: engines that passed with it, which were given the same.
    """
    told = frozenset(name for rank in one.report.tensors for name in rank)
    if one.adapter and not tells_of(one.adapter, one.report):
        return f"it tells no fingerprint of adapter {one.adapter!r}"
    if not one.changed or num_others:
        return ""
    pushed = told if one.changed == ALL_TENSORS else one.changed
    if alone := sorted(name for name in pushed if not _is_vouched_for(name, one)):
        return f"nobody can say what its tensor {alone[0]!r} should be"
    return ""


def tells_of(adapter: str, report: WeightsReport) -> bool:
    """Whether an adapter's tensors are among the fingerprints; SGLang leaves them out."""
    prefix = f"{ADAPTER_PREFIX}{adapter}:"
    return any(name.startswith(prefix) for rank in report.tensors for name in rank)


def first_difference(one: WeightsReport, other: WeightsReport) -> str:
    """Name of the first tensor, by rank and name, in which two reports differ; empty if none."""
    for mine, theirs in zip(one.tensors, other.tensors, strict=False):
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                return name
    if len(one.tensors) != len(other.tensors) or one.checksum != other.checksum:
        return "(the checksum of all)"
    return ""


def _lost(one: Evidence) -> str:
    """The first tensor that changed although nobody pushed it; empty if there is none."""
    if one.record is None or one.changed == ALL_TENSORS:
        return ""
    if not one.changed:
        return first_difference(one.record, one.report)
    base = frozenset(name for name in one.changed if not name.startswith(ADAPTER_PREFIX))
    for before, now in zip(one.record.tensors, one.report.tensors, strict=False):
        # SGLang fuses and shards, so its names need not be the checkpoint's: then a tensor that
        # was not pushed cannot be told from one that was.
        if not base <= before.keys():
            continue
        for name in sorted(before.keys() - one.changed):
            if now.get(name) != before[name]:
                return name
    return ""


def _not_as_sent(one: Evidence) -> str:
    """The first tensor that is not what the trainer sent; empty if all that can be told are."""
    return next(
        (
            name
            for name in sorted(one.sent)
            if _is_vouched_for(name, one) and one.report.tensors[0][name] != one.sent[name]
        ),
        "",
    )


def _is_vouched_for(name: str, one: Evidence) -> bool:
    """Whether the trainer's fingerprint of this tensor can be held against the engine's."""
    if len(one.report.tensors) != 1:  # sharded: no tensor is whole anywhere
        return False
    held = one.report.tensors[0]
    return name in held and name in one.sent and _way(held[name]) == _way(one.sent[name])


def _way(fingerprint: str) -> str:
    """How it was made: those of SGLang's own way and ours say nothing of one another."""
    return fingerprint.partition(":")[0]


def _outvoted(reports: Mapping[str, WeightsReport]) -> dict[str, str]:
    votes = Counter(_key(report) for report in reports.values())
    if len(votes) < 2:
        return {}
    key, count = votes.most_common(1)[0]
    if count * 2 > len(reports):
        right = next(engine_id for engine_id in reports if _key(reports[engine_id]) == key)
        return {
            engine_id: (
                f"tensor {first_difference(reports[right], report)!r} differs from engine "
                f"{right} and {count - 1} more"
            )
            for engine_id, report in reports.items()
            if _key(report) != key
        }
    names = list(reports)
    return {
        engine_id: (
            f"tensor {first_difference(report, reports[_other(names, engine_id, reports)])!r} "
            "differs between the engines, and no majority says who is right"
        )
        for engine_id, report in reports.items()
    }


def _other(names: list[str], engine_id: str, reports: Mapping[str, WeightsReport]) -> str:
    return next(name for name in names if _key(reports[name]) != _key(reports[engine_id]))


def _key(report: WeightsReport) -> tuple[object, ...]:
    return (report.checksum, tuple(tuple(sorted(rank.items())) for rank in report.tensors))
