"""``rollout report``: a run folder as one self-contained HTML file, with the charts of the page."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from engines.protocol.plain_text import size_text
from rollout.cli.lib.launches import NOT_STOPPED, spans_of_launch
from rollout.cli.lib.output import print_json, show, write_text
from rollout.cli.lib.push_rows import HEADS, push_rows
from rollout.control.server.runs import recorded_run
from rollout.observability.recorded import read_figures
from rollout.observability.timeline.analysis import Step, pushes, slowest_engines, steps
from rollout.observability.timeline.span import Kind, Outcome, Span
from rollout.observability.timeline.span_file import read_spans

_MAX_FAILURES = 200
_SAMPLED_STEPS = 5
_LAG = "rollout/version_lag/"
_EVAL = re.compile(r"eval/[^/]*")
_STATIC = files("rollout.observability.page") / "static"
_MODULES = ("elements.js", "charts.js")
# Nothing is loaded: the file can be sent to others, and opened without a network.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
_DRAW = """
const draw = ({ title, lines, entries }) => (lines ? curve(title, lines) : bars(title, entries));
const charts = JSON.parse(document.getElementById("data").textContent).map(draw);
const show = () => place(document.getElementById("charts"), charts);
addEventListener("resize", show);
show();
"""

# As the page's ``charts.js`` takes it: a title, and ``lines`` or ``entries`` of bars.
_Chart = dict[str, Any]


def write_report(run: Path, out: Path | None, launch: str, *, as_json: bool) -> None:
    """Write the report of one launch of a run."""
    run = recorded_run(run)
    chosen, spans = spans_of_launch(read_spans(run), launch)
    figures = [entry for entry in read_figures(run) if entry.get("launch", "") == chosen.launch]
    found = steps(spans)
    target = out or run / "report.html"
    num_failures = len(_failures(spans))
    lost_s = sum(step.lost_s for step in found)
    paused_s = sum(step.paused_s for step in found)
    totals = (
        f"{len(found)} steps, {lost_s:.1f} s lost at their boundaries, {paused_s:.1f} s paused for "
        f"pushes, {num_failures} failures"
    )
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
                "paused_s": paused_s,
            }
        )
    else:
        show(f"{target}: {totals}")


def render_report(
    title: str, totals: str, figures: list[dict[str, Any]], spans: list[Span], all_steps: list[Step]
) -> str:
    """The report as HTML."""
    charts = _charts(figures, all_steps)
    drawn = [chart for chart in charts if chart.get("lines") or chart.get("entries")]
    missing = [chart["title"] for chart in charts if chart not in drawn]
    parts = [
        f"<p>No data was recorded: {escape('; '.join(missing))}.</p>" if missing else "",
        "<h2>Samples of the last steps</h2>" + _samples(figures),
        "<h2>Pushes</h2>" + _table(HEADS, push_rows(pushes(spans, all_steps))),
        "<h2>Slowest engine of each phase</h2>" + _slowest(spans),
        "<h2>Memory of the engines at their last release</h2>" + _memory(spans),
        "<h2>Failures and recovery</h2>" + _failure_table(spans),
    ]
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(span.start_s for span in spans)))
    data = json.dumps(drawn, ensure_ascii=False).replace("<", "\\u003c")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<style>{(_STATIC / 'page.css').read_text()}</style><main><h1>{escape(title)}</h1>"
        f'<p>Began {began}; {escape(totals)}.</p><div id="charts" class="charts"></div>'
        f"{''.join(parts)}"
        f'</main><script type="application/json" id="data">{data}</script>'
        f'<script type="module">{_script()}</script></html>\n'
    )


def _script() -> str:
    """The modules as one, because a file cannot import another one without a server."""
    code = "".join((_STATIC / name).read_text() for name in _MODULES)
    return re.sub(r"^import .*|^export ", "", code, flags=re.MULTILINE) + _DRAW


def _charts(figures: list[dict[str, Any]], all_steps: list[Step]) -> list[_Chart]:
    rollouts = [entry for entry in figures if "rollout/reward/mean" in entry["metrics"]]
    evals = sorted(
        {name for entry in figures for name in entry["metrics"] if _EVAL.fullmatch(name)}
    )
    lines = {name: name for name in evals}
    evaluations = [_curves("Evaluations, by step", figures, lines)] if evals else []
    phases = list(dict.fromkeys(name for step in all_steps for name in step.phase_s))
    return [
        _curves(
            "Reward, by step",
            rollouts,
            {"mean": "rollout/reward/mean", "best": "rollout/reward/max"},
        ),
        *evaluations,
        _curves(
            "Tokens per second during the rollout, by step",
            rollouts,
            {"tokens per second": "rollout/tokens_per_s"},
        ),
        _by_step("Seconds of each phase, by step", [step.phase_s for step in all_steps], phases),
        _by_step(
            "Seconds lost at the boundary, and seconds of the trainer, by step",
            [{"lost": step.lost_s, "trainer": step.trainer_s} for step in all_steps],
            ["lost", "trainer"],
        ),
        _bars(
            "Output lengths: number of samples with at most this many tokens",
            _lengths(rollouts),
            "≤ {}",
        ),
        _bars(
            "Version lag: number of samples whose oldest token is this many versions behind",
            _lag(rollouts),
        ),
    ]


def _curves(title: str, figures: list[dict[str, Any]], names: Mapping[str, str]) -> _Chart:
    """One line for each of ``names`` (shown name -> key of the figure) that has points, the last
    of each step."""
    lines = {
        name: [
            [step, value]
            for step, value in sorted(
                {
                    entry["step"]: entry["metrics"][key]
                    for entry in figures
                    if key in entry["metrics"]
                }.items()
            )
        ]
        for name, key in names.items()
    }
    return _of_lines(title, lines)


def _by_step(title: str, rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> _Chart:
    lines = {
        name: [[number, row.get(name, 0.0)] for number, row in enumerate(rows, 1)] for name in names
    }
    return _of_lines(title, lines)


def _of_lines(title: str, lines: Mapping[str, list[list[float]]]) -> _Chart:
    named = [{"name": name, "points": points} for name, points in lines.items() if points]
    return {"title": title, "lines": named}


def _bars(title: str, counts: Mapping[int, float], label: str = "{}") -> _Chart:
    return {
        "title": title,
        "entries": [[label.format(bound), counts[bound]] for bound in sorted(counts)],
    }


def _lengths(figures: list[dict[str, Any]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for entry in figures:
        total.update({int(bound): num for bound, num in entry.get("lengths", {}).items()})
    return total


def _lag(figures: list[dict[str, Any]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for entry in figures:
        for name, num in entry["metrics"].items():
            if name.startswith(_LAG):
                total[int(float(name.removeprefix(_LAG)))] += num
    return total


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _samples(figures: list[dict[str, Any]]) -> str:
    """A few samples of the last steps, as the driver has chosen them."""
    sampled = [entry for entry in figures if entry.get("samples")][-_SAMPLED_STEPS:]
    if not sampled:
        return "<p>None was recorded.</p>"
    heads = ("step", "prompt", "reply", "reward", "tokens", "engines", "versions", "status")
    rows = (
        (str(entry["step"]), *(_shown(sample[name]) for name in heads[1:]))
        for entry in reversed(sampled)
        for sample in entry["samples"]
    )
    return f'<div class="samples">{_table(heads, rows)}</div>'


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def _slowest(spans: list[Span]) -> str:
    heads = ("phase", "engine", "its seconds", "median", "engine-seconds the others waited")
    rows = (
        (
            phase,
            slowest.engine_id,
            f"{slowest.elapsed_s:.2f}",
            f"{slowest.median_s:.2f}",
            f"{slowest.waited_s:.2f}",
        )
        for phase, slowest in slowest_engines(spans).items()
    )
    return _table(heads, rows)


def _memory(spans: list[Span]) -> str:
    """Memory on the GPUs of an engine counts all programs there, such as the trainer."""
    last = {
        (span.source, span.engine_id): span
        for span in sorted(spans, key=lambda span: span.start_s)
        if span.kind is Kind.ENGINE
        and span.name == "release_memory_occupation"
        and span.outcome is Outcome.OK
    }
    if not last:
        return "<p>None was released.</p>"
    heads = ("source", "engine", "measured on", "before", "after", "freed")
    return _table(heads, ((*engine, *_memory_cells(span)) for engine, span in last.items()))


def _memory_cells(span: Span) -> tuple[str, ...]:
    before, after, freed = span.memory_before_bytes, span.memory_after_bytes, span.freed_bytes
    if before is None or after is None or freed is None:
        return ("not measured", "", "", "")
    where = f"{span.num_gpus} GPUs" if span.num_gpus else "host"
    return (where, size_text(before), size_text(after), size_text(freed))


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
    rows = (
        (
            time.strftime("%H:%M:%S", time.gmtime(span.start_s)),
            *(span.source, span.engine_id, span.name, span.said[:400]),
        )
        for span in shown[:_MAX_FAILURES]
    )
    num_more = len(shown) - _MAX_FAILURES
    more = f"<p>... and {num_more} more.</p>" if num_more > 0 else ""
    return _table(("UTC", "source", "engine", "name", "message"), rows) + more
