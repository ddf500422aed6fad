"""``rollout report``: a run folder as one self-contained HTML file."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from engines.protocol.plain_text import size_text
from rollout.cli.lib.launch_option import (
    NOT_STOPPED,
    LaunchId,
    ListLaunches,
    show_launches,
    spans_of_launch,
)
from rollout.cli.lib.output import AsJson, console, print_json, write_text
from rollout.core.errors import ConfigError
from rollout.observability import svg_charts
from rollout.observability.recorded_figures import read_figures
from rollout.observability.timeline.analysis import Step, slowest_engines, steps
from rollout.observability.timeline.span import Kind, Outcome, Span
from rollout.observability.timeline.span_file import read_spans

_MAX_FAILURES = 200
_LAG = "rollout/version_lag/"
_EVAL = re.compile(r"eval/[^/]*")
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; }
svg { width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
svg .title { font-size: 13px; font-weight: 600; } .grid { stroke: currentColor; opacity: .15; }
figure { margin: 1.2rem 0; } figcaption span { margin-right: 1em; font-size: 12px; }
figcaption i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: .25rem .6rem; }
th, td { border-bottom: 1px solid #8884; vertical-align: top; }
"""


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Default: report.html in the run folder.")
    ] = None,
    launch: LaunchId = "",
    list_launches: ListLaunches = False,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file: reward, phase times, boundary loss, lengths, version lag, failures.

    It shows one launch of the run.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: there is no such run folder")
    recorded = read_spans(run)
    if list_launches:
        show_launches(recorded, as_json=as_json)
        return
    chosen, spans = spans_of_launch(recorded, launch)
    figures = [entry for entry in read_figures(run) if entry.get("launch", "") == chosen.launch]
    found = steps(spans)
    target = out or run / "report.html"
    num_failures = len(_failures(spans))
    lost_s = sum(step.lost_s for step in found)
    totals = f"{len(found)} steps, {lost_s:.1f} s lost at their boundaries, {num_failures} failures"
    if not chosen.is_stopped:
        totals += f", {NOT_STOPPED}"
    title = " ".join(filter(None, (run.name, chosen.launch)))
    write_text(target, render_report(title, totals, figures, spans, found))
    if as_json:
        print_json(
            {
                "report": str(target),
                "launch": chosen.launch,
                "is_stopped": chosen.is_stopped,
                "num_steps": len(found),
                "num_failures": num_failures,
                "lost_s": lost_s,
            }
        )
    else:
        console().print(f"{target}: {totals}")


def render_report(
    title: str, totals: str, figures: list[dict[str, Any]], spans: list[Span], found: list[Step]
) -> str:
    """The report as HTML."""
    rollouts = [entry for entry in figures if "rollout/reward/mean" in entry["metrics"]]
    evals = [
        entry for entry in figures if any(name.startswith("eval/") for name in entry["metrics"])
    ]
    names = sorted({name for entry in evals for name in entry["metrics"] if _EVAL.fullmatch(name)})
    numbers = list(range(1, len(found) + 1))
    phases = list(dict.fromkeys(name for step in found for name in step.phase_s))
    parts = [
        _curves(
            "Reward, by step",
            rollouts,
            {"mean": "rollout/reward/mean", "best": "rollout/reward/max"},
        ),
        _curves("Evaluations, by step", evals, {name: name for name in names}) if names else "",
        _curves(
            "Tokens per second during the rollout, by step",
            rollouts,
            {"tokens per second": "rollout/tokens_per_s"},
        ),
        svg_charts.stacked(
            "Seconds of each phase, by step",
            numbers,
            {name: [step.phase_s.get(name, 0.0) for step in found] for name in phases},
        ),
        svg_charts.lines(
            "Seconds lost at the boundary, and seconds of the trainer, by step",
            numbers,
            {
                "lost": [step.lost_s for step in found],
                "trainer": [step.trainer_s for step in found],
            },
        ),
        _lengths(rollouts),
        _lag(rollouts),
        "<h2>Slowest engine of each phase</h2>" + _slowest(spans),
        "<h2>Memory of the engines at their last release</h2>" + _memory(spans),
        "<h2>Failures and recovery</h2>" + _failure_table(spans),
    ]
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(span.start_s for span in spans)))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>"
        f"<p>Began {began}; {totals}.</p>{''.join(parts)}</html>\n"
    )


def _curves(title: str, figures: list[dict[str, Any]], names: Mapping[str, str]) -> str:
    """One line for each of ``names`` (shown name -> key of the figure)."""
    return svg_charts.lines(
        title,
        [entry["step"] for entry in figures],
        {name: [entry["metrics"].get(key) for entry in figures] for name, key in names.items()},
    )


def _lengths(figures: list[dict[str, Any]]) -> str:
    total: Counter[int] = Counter()
    for entry in figures:
        total.update({int(bound): num for bound, num in entry.get("lengths", {}).items()})
    return svg_charts.bars(
        "Output lengths: number of samples with at most this many tokens",
        {f"≤ {bound}": total[bound] for bound in sorted(total)},
    )


def _lag(figures: list[dict[str, Any]]) -> str:
    total: Counter[int] = Counter()
    for entry in figures:
        for name, num in entry["metrics"].items():
            if name.startswith(_LAG):
                total[int(float(name.removeprefix(_LAG)))] += num
    return svg_charts.bars(
        "Version lag: number of samples whose oldest token is this many versions behind",
        {str(lag): total[lag] for lag in sorted(total)},
    )


def _slowest(spans: list[Span]) -> str:
    rows = "".join(
        f"<tr><td>{escape(phase)}<td>{escape(slowest.engine_id)}<td>{slowest.elapsed_s:.2f}"
        f"<td>{slowest.median_s:.2f}<td>{slowest.waited_s:.2f}"
        for phase, slowest in slowest_engines(spans).items()
    )
    return (
        "<table><tr><th>phase<th>engine<th>its seconds<th>median<th>engine-seconds the others "
        f"waited</tr>{rows}</table>"
    )


def _memory(spans: list[Span]) -> str:
    """Memory on the GPUs of an engine counts all programs there, such as the trainer."""
    last = {
        (span.source, span.engine_id): span
        for span in sorted(spans, key=lambda span: span.start_s)
        if span.kind is Kind.ENGINE and span.name == "release" and span.outcome is Outcome.OK
    }
    if not last:
        return "<p>None was released.</p>"
    rows = "".join(
        f"<tr><td>{escape(source)}<td>{escape(engine_id)}<td>{_memory_cells(span)}"
        for (source, engine_id), span in last.items()
    )
    return (
        "<table><tr><th>source<th>engine<th>measured on<th>before<th>after<th>freed</tr>"
        f"{rows}</table>"
    )


def _memory_cells(span: Span) -> str:
    before, after, freed = span.memory_before_bytes, span.memory_after_bytes, span.freed_bytes
    if before is None or after is None or freed is None:
        return "not measured<td><td><td>"
    where = f"{span.num_gpus} GPUs" if span.num_gpus else "host"
    return f"{where}<td>{size_text(before)}<td>{size_text(after)}<td>{size_text(freed)}"


def _failures(spans: list[Span]) -> list[Span]:
    """Failed spans without calls: a failed call also fails the span of its engine."""
    return [
        span
        for span in spans
        if span.outcome in (Outcome.FAILED, Outcome.CANCELLED) and span.kind is not Kind.CALL
    ]


def _failure_table(spans: list[Span]) -> str:
    events = [span for span in spans if span.kind is Kind.EVENT and span.name != "gate"]
    shown = sorted([*_failures(spans), *events], key=lambda span: span.start_s)
    if not shown:
        return "<p>None.</p>"
    rows = "".join(
        f"<tr><td>{time.strftime('%H:%M:%S', time.gmtime(span.start_s))}<td>{escape(span.source)}"
        f"<td>{escape(span.engine_id)}<td>{escape(span.name)}<td>{escape(span.said[:400])}"
        for span in shown[:_MAX_FAILURES]
    )
    more = (
        f"<p>... and {len(shown) - _MAX_FAILURES} more.</p>" if len(shown) > _MAX_FAILURES else ""
    )
    return f"<table><tr><th>UTC<th>source<th>engine<th>name<th>message</tr>{rows}</table>{more}"
