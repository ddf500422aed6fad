"""Steps computed from spans: the time lost at the boundary, each phase's slowest engine, and the
seconds of each rank of the trainer in pushes.

Always true: only finished spans count; a step is complete only with its
``continue_generation``.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollout.core.types import PushStage
from rollout.observability.timeline.span import COPY, Kind, Outcome, Span
from rollout.rules.lifecycle import STAGE, Command

_DOWN = (Command.PAUSE_GENERATION, Command.FLUSH_CACHE, Command.RELEASE_MEMORY_OCCUPATION)


@dataclass(frozen=True, slots=True)
class Step:
    """A server's interval from a ``pause_generation`` to the ``continue_generation`` that ends it.

    Attributes:
        lost_s: seconds without generation outside ``trainer_s``: from the pause to the end of the
            last release, and from the start of the onload to the end of ``continue_generation``.
        paused_s: seconds without generation because of a push: from the pause, or after a release
            from the start of the update, to the end of ``continue_generation``; of an adapter,
            those in which it was staged behind a closed gate; 0 without a push.
        trainer_s: seconds between the last release and the onload, when the trainer had the memory.
        phase_s: command -> seconds.
        slowest: command -> the engine that took longest in it.
        failures: failed spans of engines.
    """

    server: str
    start_s: float
    end_s: float
    lost_s: float
    paused_s: float
    trainer_s: float
    weight_version: int | None
    phase_s: Mapping[str, float]
    slowest: Mapping[str, Slowest]
    failures: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class PushTotals:
    """A push that has succeeded.

    Attributes:
        route: how the bytes reached the engines, with the encoding if it is not whole tensors.
        num_bytes: those that all ranks have sent.
        density: the share of the elements that were changed, if only these were sent.
        elapsed_s: seconds from its first bucket until the engines had applied the last one.
        paused_s: of its step; 0 for one at an open gate.
    """

    server: str
    weight_version: int | None
    route: str
    num_bytes: int
    density: float | None
    elapsed_s: float
    paused_s: float


@dataclass(frozen=True, slots=True)
class Slowest:
    """The engine that a phase waited for.

    Attributes:
        elapsed_s: seconds it took.
        median_s: over all engines in that phase, this one included.
        waited_s: engine-seconds that the other engines waited for it.
    """

    engine_id: str
    elapsed_s: float
    median_s: float
    waited_s: float


def steps(spans: Iterable[Span]) -> list[Step]:
    """The complete steps of all servers, in the order of their ends."""
    spans = sorted(spans, key=lambda span: span.start_s)
    staged = [span for span in spans if span.name == STAGE and span.kind is Kind.PHASE]
    engines = [
        span for span in spans if span.kind is Kind.ENGINE and span.outcome is not Outcome.RUNNING
    ]
    opened: dict[str, list[Span]] = {}
    found = []
    for span in spans:
        if span.kind is not Kind.PHASE or span.outcome is Outcome.RUNNING:
            continue
        if span.name == Command.PAUSE_GENERATION and span.source not in opened:
            opened[span.source] = []
        if span.source in opened:
            opened[span.source].append(span)
            if span.name == Command.CONTINUE_GENERATION and span.outcome is Outcome.OK:
                step = _step(span.source, opened.pop(span.source), engines)
                staged_s = sum(
                    push.elapsed_s
                    for push in staged
                    if push.source == step.server and step.start_s <= push.start_s <= step.end_s
                )
                found.append(replace(step, paused_s=step.paused_s or staged_s))
    return sorted(found, key=lambda step: step.end_s)


def step_metrics(step: Step) -> dict[str, float]:
    """Metrics ``server/...`` of a step, for the trackers of a training script; seconds."""
    return {
        "server/lost_s": step.lost_s,
        "server/paused_s": step.paused_s,
        "server/trainer_s": step.trainer_s,
        **{f"server/phase_s/{name}": elapsed_s for name, elapsed_s in step.phase_s.items()},
    }


def _step(server: str, phases: Sequence[Span], engines: Sequence[Span]) -> Step:
    start_s, end_s = phases[0].start_s, max(phase.end_s for phase in phases)
    released_s = [
        phase.end_s for phase in phases if phase.name == Command.RELEASE_MEMORY_OCCUPATION
    ]
    up = [phase.start_s for phase in phases if phase.name not in _DOWN]
    trainer_s = max(0.0, min(up) - max(released_s)) if released_s and up else 0.0
    pushed_s = [phase.start_s for phase in phases if phase.name == Command.UPDATE_WEIGHTS]
    paused_from_s = min(pushed_s) if pushed_s and released_s else start_s
    phase_s: dict[str, float] = defaultdict(float)
    for phase in phases:
        phase_s[phase.name] += phase.elapsed_s
    inside = [
        span
        for span in engines
        if start_s <= span.start_s <= end_s and span.source.partition("/")[0] == server
    ]
    versions = [phase.weight_version for phase in phases if phase.weight_version is not None]
    return Step(
        server=server,
        start_s=start_s,
        end_s=end_s,
        lost_s=end_s - start_s - trainer_s,
        paused_s=end_s - paused_from_s if pushed_s else 0.0,
        trainer_s=trainer_s,
        weight_version=max(versions, default=None),
        phase_s=dict(phase_s),
        slowest=slowest_engines(inside),
        failures=tuple(span for span in inside if span.outcome is Outcome.FAILED),
    )


def slowest_engines(spans: Iterable[Span]) -> dict[str, Slowest]:
    """The engine that took longest in each phase; an engine's spans of one phase are summed."""
    by_phase: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.kind is Kind.ENGINE and span.outcome is not Outcome.RUNNING:
            by_phase[span.name][span.engine_id] += span.elapsed_s
    return {phase: _slowest(seconds) for phase, seconds in by_phase.items()}


def pushes(spans: Iterable[Span], of_steps: Iterable[Step]) -> list[PushTotals]:
    """The pushes whose spans of ranks are among these, in the order of their starts."""
    of_ranks = [span for span in spans if span.kind is Kind.RANK]
    if not of_ranks:  # as mostly: a page asks for each of its few new spans
        return []
    by_push: dict[tuple[str, int | None], list[Span]] = defaultdict(list)
    for span in sorted(of_ranks, key=lambda span: span.start_s):
        by_push[span.source, span.weight_version].append(span)
    paused_s = {(step.server, step.weight_version): step.paused_s for step in of_steps}
    return [
        PushTotals(
            *push,
            route=next((part.route for part in parts if part.route), ""),
            num_bytes=sum(part.num_bytes for part in parts if part.name == COPY),
            density=next((part.density for part in parts if part.density is not None), None),
            elapsed_s=max(part.end_s for part in parts) - parts[0].start_s,
            paused_s=paused_s.get(push, 0.0),
        )
        for push, parts in by_push.items()
    ]


def push_stages(spans: Iterable[Span]) -> list[PushStage]:
    """Seconds and bytes of each rank and stage, over all pushes; the longest first."""
    found: dict[tuple[int, str, str], PushStage] = {}
    for span in spans:
        if span.rank is not None:
            key = (span.rank, span.name, span.route)
            before = found.get(key, PushStage(*key, 0, 0.0))
            found[key] = replace(
                before,
                num_bytes=before.num_bytes + span.num_bytes,
                elapsed_s=before.elapsed_s + span.elapsed_s,
            )
    return sorted(found.values(), key=lambda stage: -stage.elapsed_s)


def _slowest(seconds: Mapping[str, float]) -> Slowest:
    engine_id = max(seconds, key=lambda name: seconds[name])
    longest_s = seconds[engine_id]
    return Slowest(
        engine_id,
        longest_s,
        statistics.median(seconds.values()),
        sum(longest_s - elapsed_s for elapsed_s in seconds.values()),
    )
