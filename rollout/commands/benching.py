"""``rollout bench``: what a router gives under load, and what an offload and onload cost it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout.commands import sources
from rollout.commands.bench_table import show
from rollout.commands.load import LoadPlan
from rollout.commands.measuring import (
    find_running,
    from_file,
    measure_own,
    measure_running,
    own_engines,
)
from rollout.commands.output import AsJson, print_json
from rollout.commands.serving import Backend
from rollout.errors import ConfigError, RolloutError

_CYCLES = 5

_Target = Annotated[
    str,
    typer.Argument(
        help="A configuration file: its engines are started, measured and ended. Or what runs "
        "already: the URL of a router, an engine or a page, or a run's folder or id. Left out: "
        "two engines of --engine."
    ),
]
_Cycles = Annotated[
    int | None,
    typer.Option(
        min=0,
        help=f"Offloads and onloads after that, under the same load; left out: {_CYCLES}. Only "
        "of engines that bench has started.",
    ),
]


def bench(
    target: _Target = "",
    clients: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 32,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long they are counted.")] = 10.0,
    cycles: _Cycles = None,
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
        config = from_file(path) if target else own_engines(engine)
        told = measure_own(
            config, server, backend, plan, seconds, _CYCLES if cycles is None else cycles
        )
    elif cycles:
        raise ConfigError(
            f"--cycles {cycles}: only what bench has started itself is offloaded, and {target} may "
            "be in somebody's training. Give a configuration file"
        )
    else:
        found = find_running(target, key=key, ray=ray, address=address, namespace=namespace)
        told = measure_running(found, target, server, plan, seconds)
    if not told["load"]["num_done"]:
        raise RolloutError(f"no completion came: {'; '.join(told['load']['errors'])}")
    if as_json:
        print_json(told)
    else:
        show(told)
