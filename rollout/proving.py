"""Proof that the engines of a group hold the weights they should.

Always true: an engine that is stale goes along and proves nothing; what is compared with what is
decided in ``verification.py``; what that leaves open the engine owes, see ``hearing.py``.
"""

from __future__ import annotations

from typing import Any

from rollout.errors import LifecycleError
from rollout.fanout import Answer
from rollout.hearing import Hearing
from rollout.member import Member
from rollout.roster import Roster
from rollout.timeline.recorder import current
from rollout.verification import Evidence, Proof, judge, left_open

_SAYS_NOTHING = "it tells no fingerprints"


async def testify(member: Member, version: int) -> Proof | None:
    """It says that it holds ``version``, and shows its fingerprints if it can.

    Raises:
        LifecycleError: it holds something else.
    """
    if member.is_stale:
        return None  # it goes along, and serves nothing
    if member.weight_version != version:
        holds = "no whole version" if member.weight_version is None else "another one"
        raise LifecycleError(f"weight version {version} never reached it; it holds {holds}")
    held = await member.engine.weight_version()
    if held != str(version):
        raise LifecycleError(f"it reports weight version {held!r}, not '{version}'")
    report = await member.fingerprints()
    proof = Proof("version" if report is None else "fingerprint", report)
    if (span := current()) is not None:
        span.proved_by = proof.by
        if report is not None:
            span.read_bytes, span.read_cpu_s = report.num_bytes, report.cpu_s
    return proof


def compare(
    answers: dict[str, Answer[Any]], roster: Roster, hearing: Hearing
) -> dict[str, Answer[Any]]:
    """Refuse the answers of engines whose weights are not what they should be; prove the others."""
    reports = {
        name: one.value and one.value.report for name, one in answers.items() if one.failure is None
    }
    evidence = {
        name: Evidence(
            report,
            roster[name].record,
            roster[name].changed,
            roster[name].comparable(),
            roster[name].adapter,
        )
        for name, report in reports.items()
        if report is not None
    }
    wrong = judge(evidence)
    passed = {name: one for name, one in evidence.items() if name not in wrong}
    for name, report in reports.items():
        if name in wrong:
            answers[name] = answers[name].refused("verify", name, wrong[name])
        elif not roster[name].is_stale:
            roster[name].prove(report)
            because = left_open(passed[name], len(passed) - 1) if name in passed else _SAYS_NOTHING
            if roster[name].expected:
                because = because or "the trainer has told what it should tell"
            if because:
                hearing.owe(roster[name], because)
    return answers


def reached_nobody(version: int, roster: Roster) -> str:
    """Why ``version`` cannot be verified; empty if it can.

    Where all engines are stale there is nothing to verify, and nobody serves until the next push.
    """
    members = roster.unfenced()
    if members and all(member.is_stale for member in members):
        return ""
    held = {member.weight_version for member in members}
    return f"weight version {version} reached no engine" if version not in held else ""
