"""``rollout bench``: what a router gives under load, and what an offload and onload cost it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from engines.fake import write_checkpoint
from rollout.commands import sources
from rollout.commands.cycling import boundary, cycle, step_of
from rollout.commands.load import Load, LoadPlan, figures
from rollout.commands.output import AsJson, console, print_json
from rollout.commands.planning import load as load_config
from rollout.commands.serving import Backend, launched
from rollout.commands.tracing import read_spans
from rollout.config import RolloutConfig
from rollout.errors import ConfigError, RolloutError
from rollout.handle import DeploymentHandle
from rollout.run_folder import RunFolder
from rollout.timeline.analysis import Step, steps

_CYCLES = 5
_MAX_FAILURES = 5
# So long a token of a fake takes: what is left of a request is this library's own time.
_FAKE_TOKEN_S = 0.002
# What the table has a row for: its name, the figure, decimals.
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


def bench(
    target: Annotated[
        str,
        typer.Argument(
            help="A configuration file: its engines are started, measured and ended. Or what runs "
            "already: the URL of a router, an engine or a page, or a run's folder or id. Left out: "
            "two engines of --engine."
        ),
    ] = "",
    clients: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 32,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long they are counted.")] = 10.0,
    cycles: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=f"Offloads and onloads after that, under the same load; left out: {_CYCLES}. Only "
            "of engines that bench has started.",
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each completion.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds for one completion.")] = 600.0,
    server: Annotated[
        str, typer.Option(help="Which server is loaded; left out: the first there is.")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="Without a target: 'fake', or 'embedded' with a tiny model.")
    ] = "fake",
    backend: Backend = "local",
    client_key: Annotated[
        str,
        typer.Option(envvar="ROLLOUT_CLIENT_KEY", help="Key of a running router, if it has one."),
    ] = "",
    key: sources.Key = "",
    ray: sources.OverRay = False,
    address: sources.Address = "auto",
    namespace: sources.Namespace = "rollout",
    as_json: AsJson = False,
) -> None:
    """Measure requests and tokens a second, how late they are, and what each step costs.

    The load comes from a process of its own. Cycles go over all servers of the configuration;
    engines read full weights from the model's folder again, in the place of a trainer's push.
    """
    plan = LoadPlan("", clients, prompt_tokens, max_new_tokens, timeout, client_key)
    path = Path(target)
    if path.is_file() or not (target or ray):
        config = _from_file(path) if target else _own_engines(engine)
        told = _of_own(
            config, server, backend, plan, seconds, _CYCLES if cycles is None else cycles
        )
    elif cycles:
        raise ConfigError(
            f"--cycles {cycles}: only what bench has started itself is offloaded, and {target} may "
            "be in somebody's training. Give a configuration file"
        )
    else:
        found = _running(target, key=key, ray=ray, address=address, namespace=namespace)
        told = _of_running(found, target, server, plan, seconds)
    if not told["load"]["num_done"]:
        raise RolloutError(f"no completion came: {'; '.join(told['load']['errors'])}")
    if as_json:
        print_json(told)
    else:
        _show(told)


# -- engines of its own ---------------------------------------------------------------------------


def _own_engines(kind: str) -> RolloutConfig:
    """Two small engines, for somebody who has no configuration yet; their model is in the run."""
    run_id = _new_run_id()
    folder = Path("runs", run_id, "model")
    options: dict[str, Any]
    if kind == "fake":
        write_checkpoint(folder)
        options = {"token-s": _FAKE_TOKEN_S}
    elif kind == "embedded":
        from engines.embedded.tiny import make_tiny_model

        make_tiny_model(folder)
        options = {"max-total-tokens": 32768}
    else:
        raise ConfigError(f"--engine {kind!r}: must be 'fake' or 'embedded'")
    engine = {"kind": kind, "options": options}
    server = {"model_path": str(folder), "groups": {"main": {"num_engines": 2, "engine": engine}}}
    return RolloutConfig.from_dict({"run_id": run_id, "servers": {"policy": server}})


def _from_file(path: Path) -> RolloutConfig:
    """As a run of its own: what was recorded before is not in its timeline."""
    return load_config(path).model_copy(update={"run_id": _new_run_id()})


def _new_run_id() -> str:
    return f"bench-{time.strftime('%Y%m%d-%H%M%S')}"


def _of_own(
    config: RolloutConfig, server: str, backend: str, plan: LoadPlan, seconds: float, cycles: int
) -> dict[str, Any]:
    folder = RunFolder.of(config).path
    _say("starting engines")
    with launched(config, backend) as deployment:
        name = _one_of(server, list(deployment))
        plan = replace(plan, url=deployment[name].url, key=config.servers[name].router.client_key)
        with Load(plan) as clients:
            told = {"run": str(folder), "server": name, "load": _steady(clients, plan, seconds)}
            if cycles:
                told["load_in_cycles"] = _cycles(deployment, config, clients, plan, cycles)
    if cycles:
        told["boundary"] = boundary([one for one in _recorded(folder) if one.server == name])
    return told


def _cycles(
    deployment: DeploymentHandle, config: RolloutConfig, clients: Load, plan: LoadPlan, num: int
) -> dict[str, Any]:
    from_s = time.monotonic()
    for number in range(num):
        _say(f"offload and onload {number + 1} of {num}")
        cycle(deployment, config)
        # Busy again before the next: as many as there are clients have got their answer.
        clients.wait_for(plan.num_clients, plan.timeout_s)
    return figures(clients.ended(), from_s, time.monotonic())


def _recorded(folder: Path) -> list[Step]:
    try:
        return steps(read_spans(folder))
    except ConfigError:  # a cluster whose nodes do not share the folder
        return []


# -- what runs already ----------------------------------------------------------------------------


def _running(target: str, **where: Any) -> list[sources.Source]:
    """The servers of a run; none where ``target`` is the URL of a router or an engine."""
    try:
        return sources.find(target, **where)
    except RolloutError:
        if target.startswith(("http://", "https://")):
            return []
        raise


def _of_running(
    found: list[sources.Source], target: str, server: str, plan: LoadPlan, seconds: float
) -> dict[str, Any]:
    if not found:
        with Load(replace(plan, url=target.rstrip("/"))) as clients:
            return {"load": _steady(clients, plan, seconds)}
    name = _one_of(server, [one.name for one in found])
    source = next(one for one in found if one.name == name)
    with Load(replace(plan, url=source.state()["router_url"])) as clients:
        from_s = time.time()
        told = {"run": source.where, "server": name, "load": _steady(clients, plan, seconds)}
    made = [step_of(one) for one in source.state().get("steps", ()) if one["start_s"] >= from_s]
    if made:
        told["boundary"] = boundary(made)
    return told


def _one_of(wanted: str, names: list[str]) -> str:
    if wanted and wanted not in names:
        raise ConfigError(f"--server {wanted!r}: there is no such server; {', '.join(names)}")
    return wanted or names[0]


# -- figures --------------------------------------------------------------------------------------


def _steady(clients: Load, plan: LoadPlan, seconds: float) -> dict[str, Any]:
    """The load once every client has had an answer."""
    _say(f"{plan.num_clients} clients on {plan.url}, {seconds:g} s")
    clients.wait_for(plan.num_clients, plan.timeout_s)
    from_s = time.monotonic()
    time.sleep(seconds)
    return figures(clients.ended(), from_s, from_s + seconds) | {"num_clients": plan.num_clients}


def _say(what: str) -> None:
    """On stderr, so that what is measured can be piped."""
    typer.echo(f"bench: {what}", err=True)


def _show(told: dict[str, Any]) -> None:
    loads = {"steady": told["load"], "with offloads": told.get("load_in_cycles")}
    named = {name: one for name, one in loads.items() if one}
    table = Table("load", *named, title=f"{told['load']['num_clients']} clients")
    for row, key, digits in _ROWS:
        values = [_number(one[key], digits) for one in named.values()]
        table.add_row(row, *values)
    console().print(table)
    if "boundary" in told:
        _show_boundary(told["boundary"])
    for one in named.values():
        for error in one["errors"][:3]:
            console().print(f"[red]{escape(error)}[/red]")
    if "load_in_cycles" in told:
        console().print(f"more of it: rollout trace {told['run']}", soft_wrap=True)


def _show_boundary(told: dict[str, Any]) -> None:
    if not told["num_cycles"]:
        console().print("no step was recorded where it can be read from here")
        return
    table = Table("phase", "median", "longest", "slowest engine", "others waited")
    for phase, one in told["phases"].items():
        who = f"{one['slowest_engine']} in {one['slowest_in']} of {told['num_cycles']}"
        table.add_row(
            phase,
            f"{one['median_s']:.3f} s",
            f"{one['longest_s']:.3f} s",
            who if one["slowest_engine"] else "",
            f"{one['others_waited_s']:.3f} s",
        )
    table.add_section()
    lost = f"{told['lost_median_s']:.3f} s", f"{told['lost_longest_s']:.3f} s"
    table.add_row("lost per step", *lost, "", "", style="bold")
    console().print(table)
    for failure in told["failures"][:_MAX_FAILURES]:
        console().print(f"[red]{escape(failure.partition(chr(10))[0])}[/red]", soft_wrap=True)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
