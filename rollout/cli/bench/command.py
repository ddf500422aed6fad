"""``rollout bench``: throughput and latency under load, and the cost of offloads and onloads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from rollout.cli.bench.load import LoadPlan
from rollout.cli.bench.measure import (
    find_running,
    from_file,
    measure_own,
    measure_running,
    own_engines,
)
from rollout.cli.lib import find_run
from rollout.cli.lib.config_file import Backend
from rollout.cli.lib.output import AsJson, console, print_json
from rollout.core.errors import ConfigError, RolloutError

_CYCLES = 5
_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")
_MAX_FAILURES = 5
# Rows of the table: title, key of the value, decimals.
_ROWS = (
    ("seconds", "seconds", 1),
    ("requests/s", "requests_per_s", 1),
    ("tokens/s", "tokens_per_s", 0),
    ("latency p50 (s)", "latency_p50_s", 3),
    ("latency p99 (s)", "latency_p99_s", 3),
    ("requests answered", "num_done", 0),
    ("ended by a pause", "num_aborted", 0),
    ("failed", "num_failed", 0),
)

_Target = Annotated[
    str,
    typer.Argument(
        help="A configuration file: its engines are started, measured and stopped. Or a running "
        "target: the URL of a router, an engine or a page, or a run's folder or id. Default: two "
        "engines of kind --engine."
    ),
]
_Cycles = Annotated[
    int | None,
    typer.Option(
        min=0,
        help=f"Offloads and onloads after that, under the same load; default: {_CYCLES}. Only for "
        "engines that bench has started.",
    ),
]


def bench(
    target: _Target = "",
    clients: Annotated[int, typer.Option(min=1, help="Number of concurrent requests.")] = 32,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Duration of the measurement, in seconds.")
    ] = 10.0,
    cycles: _Cycles = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each completion.")] = 64,
    timeout: Annotated[float, typer.Option(help="Timeout of one completion, in seconds.")] = 600.0,
    server: Annotated[
        str, typer.Option(help="Name of the server to load; default: the first.")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="Without a target: 'fake', or 'embedded' with a tiny model.")
    ] = "fake",
    backend: Backend = "local",
    client_key: Annotated[
        str,
        typer.Option(envvar="ROLLOUT_CLIENT_KEY", help="Key of a running router, if it has one."),
    ] = "",
    key: find_run.Key = "",
    ray: find_run.OverRay = False,
    address: find_run.Address = "auto",
    namespace: find_run.Namespace = "rollout",
    as_json: AsJson = False,
) -> None:
    """Measure throughput, latencies and the cost of each step.

    A separate process makes the load. Cycles offload and onload all servers of the configuration;
    in place of a trainer's push, engines read their full weights again from the model's folder.
    """
    plan = LoadPlan("", clients, prompt_tokens, max_new_tokens, timeout, client_key)
    path = Path(target)
    if path.suffix in _CONFIGURATIONS and not path.exists() and "://" not in target:
        raise ConfigError(f"there is no file {target}; {find_run.runs_here()}")
    if path.is_file() or not (target or ray):
        config = from_file(path) if target else own_engines(engine)
        measured = measure_own(
            config, server, backend, plan, seconds, _CYCLES if cycles is None else cycles
        )
    elif cycles:
        raise ConfigError(
            f"--cycles {cycles}: bench offloads only engines that it has started, and {target} may "
            "be part of a training run. Give a configuration file"
        )
    else:
        found = find_running(target, key=key, ray=ray, address=address, namespace=namespace)
        measured = measure_running(found, target, server, plan, seconds)
    if not measured["load"]["num_done"]:
        errors = measured["load"]["errors"] or [f"none ended in {seconds:g} s; raise --seconds"]
        raise RolloutError(f"no completion came: {'; '.join(errors)}")
    if as_json:
        print_json(measured)
    else:
        _show(measured)


def _show(measured: dict[str, Any]) -> None:
    loads = {"steady": measured["load"], "with offloads": measured.get("load_in_cycles")}
    loads = {name: load for name, load in loads.items() if load}
    table = Table("load", *loads, title=f"{measured['load']['num_clients']} clients")
    for row, key, digits in _ROWS:
        values = [load[key] for load in loads.values()]
        table.add_row(row, *("-" if value is None else f"{value:,.{digits}f}" for value in values))
    console().print(table)
    if "boundary" in measured:
        _show_boundary(measured["boundary"])
    for load in loads.values():
        for error in load["errors"][:3]:
            console().print(f"[red]{escape(error)}[/red]")
    if "load_in_cycles" in measured:
        console().print(f"details: rollout trace {measured['run']}", soft_wrap=True)


def _show_boundary(boundary: dict[str, Any]) -> None:
    if not boundary["num_cycles"]:
        console().print("no recorded step can be read on this machine")
        return
    table = Table("phase", "median", "longest", "slowest engine", "others waited")
    for phase, values in boundary["phases"].items():
        engine, num = values["slowest_engine"], boundary["num_cycles"]
        table.add_row(
            phase,
            f"{values['median_s']:.3f} s",
            f"{values['longest_s']:.3f} s",
            f"{engine} in {values['slowest_in']} of {num}" if engine else "",
            f"{values['others_waited_s']:.3f} s",
        )
    table.add_section()
    lost = f"{boundary['lost_median_s']:.3f} s", f"{boundary['lost_longest_s']:.3f} s"
    table.add_row("lost per step", *lost, "", "", style="bold")
    console().print(table)
    for failure in boundary["failures"][:_MAX_FAILURES]:
        console().print(f"[red]{escape(failure.partition(chr(10))[0])}[/red]", soft_wrap=True)
