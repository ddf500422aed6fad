"""``rollout doctor``: why a run is stuck, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import starmap
from typing import Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from engines.kinds import kind_of
from engines.process.cuda_runtime import runtime_text
from engines.process.gpu_memory import memory_of_all_gpus
from engines.protocol.plain_text import holder_text, size_text
from rollout.cli.lib import process_info
from rollout.cli.lib.find_run import RunningServer
from rollout.cli.lib.output import framed, print_json, show
from rollout.core.errors import RolloutError
from rollout.rules.diagnosis import Finding, Severity, diagnose
from rollout.weights.routes.nccl import nccl_of_torch

_COLORS = {
    Severity.FINE: "green",
    Severity.WATCH: "cyan",
    Severity.WRONG: "yellow",
    Severity.STUCK: "red",
}
_MAX_ENGINES = 3
_TAIL_LINES = 12


def print_diagnosis(found: Sequence[RunningServer], patience_s: float, *, as_json: bool) -> None:
    """Print what is wrong with each server; if something is, exit status 3."""
    reports = [_examine(server, patience_s) for server in found]
    if as_json:
        print_json(reports)
    else:
        for report in reports:
            _show(report)
    if any(report["weight"] >= Severity.WRONG for report in reports):
        raise typer.Exit(3)


def _examine(server: RunningServer, patience_s: float) -> dict[str, Any]:
    try:
        now = server.state()
    except RolloutError as error:
        now = {"server": server.name, "is_answering": False, "trouble": str(error)}
    findings = diagnose(now, long_s=patience_s)
    engines = {engine["engine_id"]: engine for engine in now.get("engines", ())}
    gpus, why_not = memory_of_all_gpus()
    named = [engine_id for finding in findings for engine_id in finding.engine_ids]
    examined = {
        engine_id: _examine_engine(server, engines[engine_id])
        for engine_id in list(dict.fromkeys(named))[:_MAX_ENGINES]
        if engine_id in engines
    }
    report: dict[str, Any] = {
        "server": server.name,
        "where": server.where,
        "phase": now.get("phase", "unknown"),
        "weight": findings[0].severity.value,
        "verdict": findings[0].severity.name.lower(),
        "findings": [asdict(finding) for finding in findings],
        "engines": examined,
        "gpus": [asdict(gpu) | {"free_bytes": gpu.free_bytes} for gpu in gpus],
        "why_gpus_not_measured": why_not,
        "cuda_runtimes": cuda_runtimes(now),
        "nccl": nccl_of_torch(),
        "gpus_of_engines": {
            engine_id: engine["gpus"] for engine_id, engine in engines.items() if engine["num_gpus"]
        },
    }
    if not now.get("is_answering") and server.process is not None:
        report["server_process"] = process_info.examine(server.process.pid)
    return report


def _examine_engine(server: RunningServer, engine: dict[str, Any]) -> dict[str, Any]:
    pid = process_info.pid_of(engine)
    where = engine.get("node_id", "another node")
    gone = f"its process is gone, or runs on another node ({where}): use py-spy there"
    report = {"state": gone} if pid is None else process_info.examine(pid)
    try:
        log_tail = server.log_tail(engine["engine_id"])
    except RolloutError as error:
        log_tail = f"(no log: {error})"
    return report | {"log_tail": log_tail}


def _show(report: dict[str, Any]) -> None:
    findings = [Finding(**values) for values in report["findings"]]
    for number, finding in enumerate(findings):
        color = _COLORS[Severity(finding.severity)]
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column()
        for index, line in enumerate(finding.details):
            grid.add_row("Why:" if not index else "", Text(line))
        for index, line in enumerate(finding.advice):
            grid.add_row(
                Text("Do:" if not index else "", style="bold"), Text(f"{index + 1}. {line}")
            )
        parts = Group(Text(finding.what, style=f"bold {color}"), grid)
        title = f"{report['server']}: {Severity(finding.severity).name}" if not number else ""
        show(framed(parts, title, color))
    for engine_id, known in report["engines"].items():
        _show_line(f"engine {engine_id}", known["state"])
        if known.get("stack"):
            show(_indented(known["stack"]))
        show(Text("end of its log:", style="dim"))
        tail = known["log_tail"].splitlines()[-_TAIL_LINES:]
        show(Text(_indented("\n".join(tail) or "(empty)"), style="dim"))
    process = report.get("server_process")
    if process:
        _show_line("the server", process["state"])
        show(_indented(process["stack"]))
    for line in gpu_lines(report):
        _show_line("GPU memory", line)
    for group, runtime in report["cuda_runtimes"].items():
        _show_line("CUDA runtime", f"group {group}: {runtime}")
    _show_line("NCCL", report["nccl"])


def _show_line(title: str, text: str) -> None:
    show(Text.assemble((title, "bold"), f"  {text}"))


def cuda_runtimes(now: dict[str, Any]) -> dict[str, str]:
    """Group -> the CUDA runtime that its interpreter has on this machine for the memory saver, or
    why it has none; of the groups that need one."""
    on_gpus = {engine["group"] for engine in now.get("engines", ()) if engine["num_gpus"]}
    return {
        group["name"]: runtime_text(group["python"])
        for group in now.get("groups", ())
        if kind_of(group["kind"]).preloads_saver
        and group["needs_offload"]
        and group["name"] in on_gpus
    }


def gpu_lines(report: dict[str, Any]) -> Iterator[str]:
    """The GPUs of this machine, and those of each engine, which may run elsewhere."""
    for gpu in report["gpus"]:
        yield ", ".join([_gpu_text(gpu), *starmap(holder_text, gpu["holders"].items())])
    if report["why_gpus_not_measured"] and report["gpus_of_engines"]:
        yield f"not measured on this machine: {report['why_gpus_not_measured']}"
    for engine_id, gpus in report["gpus_of_engines"].items():
        yield f"engine {engine_id}: {'; '.join(map(_gpu_text, gpus)) or 'not measured'}"


def _gpu_text(gpu: dict[str, Any]) -> str:
    used, total = gpu["used_bytes"], gpu["total_bytes"]
    return f"{gpu['uuid']}: {size_text(used)} used, {size_text(total - used)} free"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
