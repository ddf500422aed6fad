"""``rollout report``: a run folder as one HTML file that needs nothing else."""

from __future__ import annotations

import json
import time
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout import picture
from rollout.commands.output import AsJson, console, print_json
from rollout.commands.tracing import read_spans
from rollout.errors import ConfigError
from rollout.run_folder import RunFolder
from rollout.timeline.analysis import Step, slowest_engines, steps
from rollout.timeline.span import Kind, Outcome, Span

_MAX_FAILURES = 200
_LAG = "rollout/version_lag/"
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
        Path | None, typer.Option("--out", "-o", help="Left out: report.html in the run folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file: reward, phase times, boundary loss, lengths, version lag, failures."""
    if not run.is_dir():
        raise ConfigError(f"{run}: there is no such run folder")
    figures = read_figures(run)
    spans = read_spans(run)
    found = steps(spans)
    target = out or run / "report.html"
    target.write_text(page(run.name, figures, spans, found))
    told = {
        "report": str(target),
        "num_steps": len(found),
        "num_failures": len(_failures(spans)),
        "lost_s": sum(one.lost_s for one in found),
    }
    if as_json:
        print_json(told)
    else:
        console().print(
            f"{target}: {len(found)} steps, {told['lost_s']:.1f} s lost at their boundaries, "
            f"{told['num_failures']} failures"
        )


def read_figures(run: Path) -> list[dict[str, Any]]:
    """What drivers told, in the order of its time; lines cut short are passed over."""
    told = []
    for file in RunFolder(run, run.name).figure_files():
        for line in file.read_text().splitlines():
            try:
                told.append(json.loads(line))
            except ValueError:
                continue
    return sorted(told, key=lambda one: one["at_s"])


def page(title: str, figures: list[dict[str, Any]], spans: list[Span], found: list[Step]) -> str:
    """The report as HTML."""
    rollouts = [one for one in figures if "rollout/reward/mean" in one["metrics"]]
    evals = [one for one in figures if any(name.startswith("eval/") for name in one["metrics"])]
    parts = [
        _reward(rollouts),
        _evals(evals),
        _throughput(rollouts),
        _phases(found),
        picture.lines(
            "Seconds lost at the boundary, and the trainer's, by step",
            list(range(1, len(found) + 1)),
            {
                "lost": [one.lost_s for one in found],
                "trainer's": [one.trainer_s for one in found],
            },
        ),
        _lengths(rollouts),
        _lag(rollouts),
        _checking(found),
        "<h2>Slowest engine of each phase</h2>" + _slowest(spans),
        "<h2>Failures and what was done</h2>" + _failure_table(spans),
    ]
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(one.start_s for one in spans)))
    lost_s = sum(one.lost_s for one in found)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>"
        f"<p>Began {began}; {len(found)} steps, {lost_s:.1f} s lost at their boundaries, "
        f"{len(_failures(spans))} failures.</p>{''.join(parts)}</html>\n"
    )


def _reward(told: list[dict[str, Any]]) -> str:
    names = {"mean": "rollout/reward/mean", "best": "rollout/reward/max"}
    return picture.lines(
        "Reward, by step",
        [one["step"] for one in told],
        {name: [one["metrics"].get(key) for one in told] for name, key in names.items()},
    )


def _evals(told: list[dict[str, Any]]) -> str:
    names = sorted(
        {
            name
            for one in told
            for name in one["metrics"]
            if name.startswith("eval/") and name.count("/") == 1
        }
    )
    if not names:
        return ""
    return picture.lines(
        "Evaluations, by step",
        [one["step"] for one in told],
        {name: [one["metrics"].get(name) for one in told] for name in names},
    )


def _throughput(told: list[dict[str, Any]]) -> str:
    return picture.lines(
        "Tokens per second while rolling out, by step",
        [one["step"] for one in told],
        {"tokens per second": [one["metrics"].get("rollout/tokens_per_s") for one in told]},
    )


def _phases(found: list[Step]) -> str:
    names = list(dict.fromkeys(name for one in found for name in one.phase_s))
    return picture.stacked(
        "Seconds of each phase, by step",
        list(range(1, len(found) + 1)),
        {name: [one.phase_s.get(name, 0.0) for one in found] for name in names},
    )


def _lengths(told: list[dict[str, Any]]) -> str:
    total: dict[int, float] = {}
    for one in told:
        for bound, num in one.get("lengths", {}).items():
            total[int(bound)] = total.get(int(bound), 0) + num
    return picture.bars(
        "Lengths of outputs: samples with at most so many tokens",
        {f"≤ {bound}": total[bound] for bound in sorted(total)},
    )


def _lag(told: list[dict[str, Any]]) -> str:
    total: dict[int, float] = {}
    for one in told:
        for name, num in one["metrics"].items():
            if name.startswith(_LAG):
                lag = int(float(name.removeprefix(_LAG)))
                total[lag] = total.get(lag, 0) + num
    return picture.bars(
        "Version lag: samples whose oldest token is so many versions behind",
        {str(lag): total[lag] for lag in sorted(total)},
    )


def _checking(found: list[Step]) -> str:
    """What the proof of the weights cost in the last step that took fingerprints."""
    last = next((one.checking for one in reversed(found) if one.checking is not None), None)
    return "" if last is None else f"<p>Weights proved, last step: {escape(str(last))}.</p>"


def _slowest(spans: list[Span]) -> str:
    rows = "".join(
        f"<tr><td>{escape(phase)}<td>{escape(who.engine_id)}<td>{who.elapsed_s:.2f}"
        f"<td>{who.median_s:.2f}<td>{who.waited_s:.2f}"
        for phase, who in slowest_engines(spans).items()
    )
    return (
        "<table><tr><th>phase<th>engine<th>its seconds<th>median<th>engine-seconds the others "
        f"waited</tr>{rows}</table>"
    )


def _failures(spans: list[Span]) -> list[Span]:
    """Calls are left out: what they broke is there as the engine's part of the phase."""
    return [
        one
        for one in spans
        if one.outcome in (Outcome.FAILED, Outcome.CANCELLED) and one.kind is not Kind.CALL
    ]


def _failure_table(spans: list[Span]) -> str:
    events = [one for one in spans if one.kind is Kind.EVENT and one.name != "gate"]
    told = sorted([*_failures(spans), *events], key=lambda one: one.start_s)
    if not told:
        return "<p>None.</p>"
    rows = "".join(
        f"<tr><td>{time.strftime('%H:%M:%S', time.gmtime(one.start_s))}<td>{escape(one.source)}"
        f"<td>{escape(one.engine_id)}<td>{escape(one.name)}<td>{escape(one.said[:400])}"
        for one in told[:_MAX_FAILURES]
    )
    more = f"<p>... and {len(told) - _MAX_FAILURES} more.</p>" if len(told) > _MAX_FAILURES else ""
    return f"<table><tr><th>UTC<th>where<th>engine<th>what<th>said</tr>{rows}</table>{more}"
