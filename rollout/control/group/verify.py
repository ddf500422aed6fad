"""Verifies that the engines of a group hold the pushed weights.

Always true: a stale engine takes part and is never verified.  ``rules/fingerprint_check.py``
decides what is compared.  If that is inconclusive, the engine needs the log-prob check.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollout.control.engine.probe import Probe
from rollout.control.engine.state import EngineState
from rollout.control.group.engine_set import EngineSet
from rollout.core.errors import LifecycleError, WeightMismatch
from rollout.core.fanout import EngineReply
from rollout.observability.timeline.recorder import current_span
from rollout.rules.fingerprint_check import (
    EngineFingerprints,
    Verification,
    find_mismatches,
    why_inconclusive,
)


async def collect_fingerprints(member: EngineState, version: int | None) -> Verification | None:
    """Check an engine's weight version, and collect its fingerprints if it reports them.

    Returns:
        None for a stale engine.

    Raises:
        LifecycleError: it holds another version.
    """
    if member.is_stale:
        return None  # it takes part, and serves nothing
    if member.weight_version != version:
        holds = "no whole version" if member.weight_version is None else "another one"
        raise LifecycleError(f"weight version {version} never reached it; it holds {holds}")
    held = await member.engine.weight_version()
    if held != str(version):
        raise LifecycleError(f"it reports weight version {held!r}, not '{version}'")
    report = await member.fingerprints()
    verification = Verification("version" if report is None else "fingerprint", report)
    if (span := current_span()) is not None:
        span.verified_by = verification.by
        if report is not None:
            span.read_bytes = report.num_bytes
    return verification


def verify_group(
    answers: dict[str, EngineReply[Any]], engines: EngineSet, probe: Probe
) -> dict[str, EngineReply[Any]]:
    """Mark the replies of engines with wrong weights as failures; the others are verified."""
    reports = {
        name: reply.value and reply.value.report
        for name, reply in answers.items()
        if reply.failure is None
    }
    fingerprints = {
        name: EngineFingerprints(
            report,
            engines[name].record,
            engines[name].changed,
            engines[name].comparable_fingerprints(),
            engines[name].moves_experts,
        )
        for name, report in reports.items()
        if report is not None
    }
    wrong = find_mismatches(fingerprints)
    passed = {name: engine for name, engine in fingerprints.items() if name not in wrong}
    for name, report in reports.items():
        if name in wrong:
            answers[name] = answers[name].as_failure("verify", name, wrong[name])
        elif not engines[name].is_stale:
            engines[name].mark_verified(report)
            reason = (
                why_inconclusive(passed[name], len(passed) - 1)
                if name in passed
                else engines[name].why_no_fingerprints
            )
            if reason and report is not None:  # there is nothing to compare all of them with
                answers[name] = replace(answers[name], value=Verification("version", report))
            reason = reason or engines[name].why_adapters_unknown
            if engines[name].expected:
                reason = reason or "the trainer gave expected log-probs"
            if reason:
                probe.require(engines[name], reason)
    return answers


def check_equal_weights(engines: EngineSet) -> None:
    """Check that attached engines begin with equal weights, where they make fingerprints.

    Raises:
        WeightMismatch: two that report one version have others.
    """
    reports = {
        member.engine_id: EngineFingerprints(member.record)
        for member in engines.members()
        if member.record is not None
    }
    for engine_id, why in find_mismatches(reports).items():
        version = engines[engine_id].weight_version
        raise WeightMismatch(
            f"engine {engine_id} is attached at weight version {version}, but its {why}; restart "
            "the engines with the same weights, or let their trainer push them",
            engine_id=engine_id,
        )


def why_no_engine_holds(version: int | None, engines: EngineSet) -> str:
    """Why ``version`` cannot be verified.

    If all engines are stale there is nothing to verify, and none serves until the next push.
    """
    members = engines.unfenced()
    if vacant := engines.vacant if not len(engines) else ():
        return f"it has no engine; fill a slot with engines.add: {', '.join(vacant)}"
    if members and all(member.is_stale for member in members):
        return ""
    held = {member.weight_version for member in members}
    return f"weight version {version} reached no engine" if version not in held else ""
