"""``rollout doctor``: why is it stuck, and what to do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollout.commands import evidence, sources
from rollout.commands.output import AsJson, console, print_json
from rollout.diagnosis import LONG_S, Finding, Weight, diagnose
from rollout.errors import RolloutError

_COLORS = {
    Weight.FINE: "green",
    Weight.WATCH: "cyan",
    Weight.WRONG: "yellow",
    Weight.STUCK: "red",
}
_MAX_ENGINES = 3
_TAIL_LINES = 12


def doctor(
    run: sources.Run = "",
    key: sources.Key = "",
    ray: sources.OverRay = False,
    address: sources.Address = "auto",
    namespace: sources.Namespace = "rollout",
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds before a phase is called stuck.")
    ] = LONG_S,
    as_json: AsJson = False,
) -> None:
    """Say why a run is stuck: which engine, which call, since when, its stack, what to do.

    Exit status: 0 nothing is wrong, 3 something is wrong or stuck.
    """
    found = sources.find(run, key=key, ray=ray, address=address, namespace=namespace)
    told = [_examine(source, patience) for source in found]
    if as_json:
        print_json(told)
    else:
        for one in told:
            _show(one)
    if any(one["weight"] >= Weight.WRONG for one in told):
        raise typer.Exit(3)


def _examine(source: sources.Source, patience_s: float) -> dict[str, Any]:
    try:
        now = source.state()
    except RolloutError as error:
        now = {"server": source.name, "is_answering": False, "trouble": str(error)}
    findings = diagnose(now, long_s=patience_s)
    engines = {one["engine_id"]: one for one in now.get("engines", ())}
    wanted = [one for finding in findings for one in finding.engine_ids]
    looked_at = {
        engine_id: _of_engine(source, engines[engine_id])
        for engine_id in list(dict.fromkeys(wanted))[:_MAX_ENGINES]
        if engine_id in engines
    }
    told: dict[str, Any] = {
        "server": source.name,
        "where": source.where,
        "phase": now.get("phase", "unknown"),
        "weight": findings[0].weight.value,
        "verdict": findings[0].weight.name.lower(),
        "findings": [asdict(one) for one in findings],
        "engines": looked_at,
        "gpu_memory": evidence.gpu_holders(),
    }
    if not now.get("is_answering") and source.pid is not None:
        told["server_process"] = {
            "state": evidence.process_state(source.pid),
            "stack": evidence.stack(source.pid),
        }
    return told


def _of_engine(source: sources.Source, engine: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    pid = evidence.pid_of(engine)
    if pid is None:
        where = engine.get("node_id", "another node")
        told["state"] = f"its process is gone, or runs elsewhere ({where}); py-spy works there"
    else:
        told["state"] = evidence.process_state(pid)
        told["stack"] = evidence.stack(pid)
    try:
        told["log_tail"] = source.log_tail(engine["engine_id"])
    except RolloutError as error:
        told["log_tail"] = f"(no log: {error})"
    return told


def _show(told: dict[str, Any]) -> None:
    findings = [Finding(**one) for one in told["findings"]]
    for number, finding in enumerate(findings):
        color = _COLORS[Weight(finding.weight)]
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column()
        for index, line in enumerate(finding.because):
            grid.add_row("Why:" if not index else "", Text(line))
        for index, line in enumerate(finding.advice):
            grid.add_row(
                Text("Do:" if not index else "", style="bold"), Text(f"{index + 1}. {line}")
            )
        parts = Group(Text(finding.what, style=f"bold {color}"), grid)
        title = f"{told['server']}: {Weight(finding.weight).name}" if not number else None
        console().print(Panel(parts, title=title, title_align="left", border_style=color))
    for engine_id, known in told["engines"].items():
        console().print(f"[bold]engine {escape(engine_id)}[/bold]  {escape(known['state'])}")
        if known.get("stack"):
            console().print(Text(_indented(known["stack"])))
        console().print("[dim]end of its log:[/dim]")
        tail = known["log_tail"].splitlines()[-_TAIL_LINES:]
        console().print(Text(_indented("\n".join(tail) or "(empty)"), style="dim"))
    process = told.get("server_process")
    if process:
        console().print(f"[bold]the server[/bold]  {escape(process['state'])}")
        console().print(Text(_indented(process["stack"])))
    for line in told["gpu_memory"]:
        console().print(f"[bold]GPU memory[/bold]  {escape(line)}")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
