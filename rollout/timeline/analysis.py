"""What spans add up to: steps, the time lost at the boundary, the slowest engine of each phase.

Always true: only spans that have ended count; a step is only whole with its ``continue``.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollout.checking_cost import CheckingCost, Read, cost_of
from rollout.lifecycle import Command
from rollout.timeline.span import Kind, Outcome, Span

_DOWN = (Command.PAUSE, Command.FLUSH, Command.RELEASE)


@dataclass(frozen=True, slots=True)
class Step:
    """One way of a server from serving to serving.

    Attributes:
        lost_s: seconds without generation that are not the trainer's: down to the last release,
            and up from the first call of the onload.
        trainer_s: between the two, when the engines' memory was the trainer's.
        phase_s: command -> seconds.
        slowest: command -> the engine that took longest in it.
        checking: what the fingerprints of the weights cost; None if none were taken.
    """

    server: str
    start_s: float
    end_s: float
    lost_s: float
    trainer_s: float
    weight_version: int | None
    phase_s: Mapping[str, float]
    slowest: Mapping[str, Slowest]
    failures: tuple[Span, ...] = ()
    checking: CheckingCost | None = None


@dataclass(frozen=True, slots=True)
class Slowest:
    """The engine a barrier waited for.

    Attributes:
        median_s: of all engines in that phase, it included.
        waited_s: engine-seconds that the others spent waiting for it.
    """

    engine_id: str
    elapsed_s: float
    median_s: float
    waited_s: float


def steps(spans: Iterable[Span]) -> list[Step]:
    """The whole steps of all servers, in the order of their ends."""
    spans = sorted(spans, key=lambda one: one.start_s)
    engines = [
        one for one in spans if one.kind is Kind.ENGINE and one.outcome is not Outcome.RUNNING
    ]
    opened: dict[str, list[Span]] = {}
    found = []
    for span in spans:
        if span.kind is not Kind.PHASE or span.outcome is Outcome.RUNNING:
            continue
        if span.name == Command.PAUSE and span.source not in opened:
            opened[span.source] = []
        if span.source in opened:
            opened[span.source].append(span)
            if span.name == Command.CONTINUE and span.outcome is Outcome.OK:
                found.append(_step(span.source, opened.pop(span.source), engines))
    return sorted(found, key=lambda one: one.end_s)


def _step(server: str, phases: Sequence[Span], engines: Sequence[Span]) -> Step:
    start_s, end_s = phases[0].start_s, max(one.end_s for one in phases)
    released_s = [one.end_s for one in phases if one.name == Command.RELEASE]
    up = [one.start_s for one in phases if one.name not in _DOWN]
    trainer_s = max(0.0, min(up) - max(released_s)) if released_s and up else 0.0
    phase_s: dict[str, float] = defaultdict(float)
    for phase in phases:
        phase_s[phase.name] += phase.elapsed_s
    inside = [
        one
        for one in engines
        if start_s <= one.start_s <= end_s and one.source.partition("/")[0] == server
    ]
    versions = [one.weight_version for one in phases if one.weight_version is not None]
    return Step(
        server=server,
        start_s=start_s,
        end_s=end_s,
        lost_s=end_s - start_s - trainer_s,
        trainer_s=trainer_s,
        weight_version=max(versions, default=None),
        phase_s=dict(phase_s),
        slowest=slowest_engines(inside),
        failures=tuple(one for one in inside if one.outcome is Outcome.FAILED),
        checking=checking(inside, phase_s.get(Command.VERIFY, 0.0)),
    )


def checking(spans: Iterable[Span], wall_s: float) -> CheckingCost | None:
    """What the fingerprints cost that were taken in these; None if none were."""
    return cost_of(
        (
            Read(one.elapsed_s, one.read_bytes, one.read_cpu_s)
            for one in spans
            if one.kind is Kind.ENGINE and one.proved_by == "fingerprint"
        ),
        wall_s,
    )


def slowest_engines(spans: Iterable[Span]) -> dict[str, Slowest]:
    """By phase, the engine that took longest; an engine's calls within one phase add up."""
    by_phase: dict[str, dict[str, float]] = {}
    for span in spans:
        if span.kind is Kind.ENGINE and span.outcome is not Outcome.RUNNING:
            of_phase = by_phase.setdefault(span.name, {})
            of_phase[span.engine_id] = of_phase.get(span.engine_id, 0.0) + span.elapsed_s
    return {phase: _slowest(seconds) for phase, seconds in by_phase.items()}


def _slowest(seconds: Mapping[str, float]) -> Slowest:
    engine_id = max(seconds, key=lambda one: seconds[one])
    longest_s = seconds[engine_id]
    return Slowest(
        engine_id,
        longest_s,
        statistics.median(seconds.values()),
        sum(longest_s - one for one in seconds.values()),
    )
