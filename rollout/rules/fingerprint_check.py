"""The fingerprint check: compares the fingerprints that engines report of their weights.

Always true: an engine passes only after a comparison.  Tensors that must not have changed are
compared with the engine's last verified fingerprints; only this detects weights that are corrupt
after a release.  Changed tensors are compared with the other engines of the group, which received
the same push.  Where the engines differ and there is no majority, none of them passes.
What has no comparable fingerprint needs the log-prob check.

An engine with several ranks passes only if all of them have taken a push: SGLang answers for its
first, and another one that cannot read a file keeps what it had, and writes that to its log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus

from engines.protocol import WeightsReport
from engines.tensors.fingerprint import BYTES, SUMS
from rollout.rules.probe import CanaryLogprobs

ADAPTER_PREFIX = "lora:"
"""Prefix of the names of adapter tensors; no base tensor has it."""
ALL_TENSORS = frozenset({"*"})
"""The value of ``changed`` after a full push."""
# In the names of SGLang and of checkpoints; shared experts have another one, and never move.
_EXPERTS = ".experts."
# Each tensor-parallel rank has all of these; those of queries and keys may be divided.
_OF_ALL_RANKS = re.compile(r"(?<![qk]_)(?<![qk]_layer)norm\.weight$")
# So many tensors of dense layers change on each rank or on none; a few may be trained alone.
_FEW = 8


@dataclass(frozen=True, slots=True)
class EngineFingerprints:
    """The fingerprints of one engine, and what to compare them with.

    Attributes:
        report: its current fingerprints.
        record: its fingerprints when it was last verified, or None if there are none.
        changed: checkpoint names pushed since the record; ``ALL_TENSORS`` for a full push.
        sent: the trainer's fingerprints of pushed tensors; only of tensors that the engine keeps
            in the same form and under the same name.
        moves_experts: the engine places its experts by their load, so they are left out.
    """

    report: WeightsReport
    record: WeightsReport | None = None
    changed: frozenset[str] = frozenset()
    sent: Mapping[str, str] = field(default_factory=dict)
    moves_experts: bool = False


@dataclass(frozen=True, slots=True)
class Verification:
    """How the weights of one engine are verified, and what it reported for that.

    Attributes:
        by: ``version``, ``fingerprint`` or ``canary``.
    """

    by: str
    report: WeightsReport | None = None
    canaries: Mapping[str, CanaryLogprobs] = field(default_factory=dict)


def find_mismatches(engines: Mapping[str, EngineFingerprints]) -> dict[str, str]:
    """Engine id -> why it fails the check; engines that pass are left out."""
    wrong = {}
    for engine_id, engine in engines.items():
        if tensor := _changed_without_push(engine):
            wrong[engine_id] = f"tensor {tensor!r} is not what it was before, and was not pushed"
        elif tensor := _not_as_pushed(engine):
            wrong[engine_id] = f"tensor {tensor!r} is not what the trainer sent"
        elif why := _rank_without_push(engine):
            wrong[engine_id] = why
    passed = {
        engine_id: engine.report for engine_id, engine in engines.items() if engine_id not in wrong
    }
    return wrong | _unlike_majority(passed)


def why_inconclusive(engine: EngineFingerprints, num_others: int) -> str:
    """Why fingerprints do not verify all weights of an engine that passed.

    Args:
        num_others: other engines that passed, which received the same push.
    """
    if engine.moves_experts:
        return "it moves its experts (enable-eplb), so they have no comparable fingerprints"
    if engine.report.why_partial:
        return engine.report.why_partial
    reported = frozenset(name for rank in engine.report.tensors for name in rank)
    if not engine.changed or num_others:
        return ""
    pushed = reported if engine.changed == ALL_TENSORS else engine.changed
    if alone := sorted(name for name in pushed if not _has_reference(name, engine)):
        return f"there is no reference fingerprint of its tensor {alone[0]!r}"
    return ""


def method_of_push(methods: Collection[str], *, has_store: bool, writes_files: bool) -> str:
    """How to make the fingerprints of a push, or empty if nothing would be compared with them.

    Args:
        methods: methods of the engines' fingerprints.
        has_store: the weight store keeps the push.  It hashes the bytes that it reads, and compares
            them with those of a push that has such fingerprints, too.
        writes_files: engines load files, which are compared before that if the engines make no
            fingerprints that can be.
    """
    if BYTES in methods:
        return BYTES
    if SUMS in methods:
        return SUMS
    return BYTES if has_store or writes_files else ""


def is_checker_refusal(status: int, *, has_reported: bool) -> bool:
    """Whether an engine's checker does not know the kind of its weights, and so reports none.

    SGLang answers 400 for some quantisations.  A checker that reported these weights before knows
    them, so its 400 is a failure.

    Args:
        status: the HTTP status of its answer.
    """
    return status == HTTPStatus.BAD_REQUEST and not has_reported


def without_experts(report: WeightsReport) -> WeightsReport:
    """The fingerprints without those of routed experts, and without the checksum of all."""
    tensors = tuple(
        {name: text for name, text in rank.items() if _EXPERTS not in name}
        for rank in report.tensors
    )
    return replace(report, checksum=None, tensors=tensors)


def adapter_prefix(adapter: str) -> str:
    """How the names of an adapter's tensors begin, in fingerprints and manifests."""
    return f"{ADAPTER_PREFIX}{adapter}:"


def without_adapters(report: WeightsReport) -> WeightsReport:
    """The fingerprints of the base alone; SGLang reports no others."""
    tensors = tuple(
        {name: text for name, text in rank.items() if not name.startswith(ADAPTER_PREFIX)}
        for rank in report.tensors
    )
    return replace(report, tensors=tensors)


def changed_adapter(report: WeightsReport, adapters: Mapping[str, Mapping[str, str]]) -> str:
    """The first tensor of an adapter that is not as it was loaded, or empty if there is none.

    Args:
        adapters: what the engine reported when it loaded them, by its names for them.
    """
    held = {name: text for rank in report.tensors for name, text in rank.items()}
    known = (
        (adapter_prefix(adapter) + tensor, text)
        for adapter, reported in adapters.items()
        for tensor, text in reported.items()
    )
    return next((name for name, text in known if held.get(name) != text), "")


def why_not_as_sent(adapter: str, reported: Mapping[str, str], sent: Mapping[str, str]) -> str:
    """Why an engine has not loaded the adapter that was sent.

    Args:
        reported: its fingerprints by tensor.
        sent: the trainer's, with the adapter's prefix.
    """
    prefix = adapter_prefix(adapter)
    for name, text in sent.items() if reported else ():
        own = reported.get(name.removeprefix(prefix), "")
        if own != text and (not own or _scheme(own) == _scheme(text)):
            return f"tensor {name!r} is not what the trainer sent"
    return ""


def first_difference(report: WeightsReport, other: WeightsReport) -> str:
    """Name of the first tensor, by rank and name, in which two reports differ, or empty if none."""
    for mine, theirs in zip(report.tensors, other.tensors, strict=False):
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                return name
    if len(report.tensors) != len(other.tensors) or report.checksum != other.checksum:
        return "(the checksum of all)"
    return ""


def _changed_without_push(engine: EngineFingerprints) -> str:
    """The first tensor that changed although it was not pushed, or empty if there is none."""
    if engine.record is None or engine.changed == ALL_TENSORS:
        return ""
    if not engine.changed:
        return first_difference(engine.record, engine.report)
    # SGLang fuses and shards tensors.  If its names are not those of the checkpoint, it is unknown
    # which of its tensors were pushed.
    if not engine.changed <= frozenset[str]().union(*engine.record.tensors):
        return ""
    for before, now in zip(engine.record.tensors, engine.report.tensors, strict=False):
        for name in sorted(before.keys() - engine.changed):
            if now.get(name) != before[name]:
                return name
    return ""


def _rank_without_push(engine: EngineFingerprints) -> str:
    """Why one rank has not taken what the others have."""
    if engine.record is None or not engine.changed:
        return ""
    ranks = list(zip(engine.record.tensors, engine.report.tensors, strict=False))
    changed = [
        {name for name in before.keys() & now if before[name] != now[name]} for before, now in ranks
    ]
    most = {name for name in max(changed, key=len, default=set()) if _EXPERTS not in name}
    for rank, (before, _) in enumerate(ranks):
        elsewhere = most.intersection(before)
        if not changed[rank] and len(elsewhere) > _FEW:
            what = f"{len(elsewhere)} of its tensors have changed on another rank"
            return f"rank {rank} has not taken the push: {what}, and none on it"
    first: dict[str, tuple[str, str]] = {}
    for rank, (before, now) in enumerate(ranks):
        for name in sorted(filter(_OF_ALL_RANKS.search, before.keys() & now)):
            had, has = first.setdefault(name, (before[name], now[name]))
            if had == before[name] and has != now[name]:
                return f"tensor {name!r} of rank {rank} is not that of the ranks before it"
    return ""


def _not_as_pushed(engine: EngineFingerprints) -> str:
    """The first tensor that differs from the pushed one, or empty if no comparable tensor does."""
    for name in sorted(engine.sent):
        if _has_reference(name, engine) and set(_held(name, engine)) != {engine.sent[name]}:
            return name
    return ""


def _has_reference(name: str, engine: EngineFingerprints) -> bool:
    """Whether the trainer's fingerprint of this tensor can be compared with the engine's."""
    schemes = {_scheme(text) for text in _held(name, engine)}
    return name in engine.sent and schemes == {_scheme(engine.sent[name])}


def _held(name: str, engine: EngineFingerprints) -> list[str]:
    """Its fingerprint of a tensor on each rank that has it: a head that is tied to the embedding is
    in the last pipeline stage too."""
    return [rank[name] for rank in engine.report.tensors if name in rank]


def _scheme(fingerprint: str) -> str:
    """The way a fingerprint was computed; only fingerprints of the same scheme are comparable."""
    return fingerprint.partition(":")[0]


def _unlike_majority(reports: Mapping[str, WeightsReport]) -> dict[str, str]:
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
    wrong = {}
    for engine_id, report in reports.items():
        other = next(other for other in reports.values() if _key(other) != _key(report))
        wrong[engine_id] = (
            f"tensor {first_difference(report, other)!r} differs between the engines, and there "
            "is no majority"
        )
    return wrong


def _key(report: WeightsReport) -> tuple[object, ...]:
    return (report.checksum, tuple(tuple(sorted(rank.items())) for rank in report.tensors))
