"""``rollout status`` and ``rollout top``: the state of a run, once or repeatedly."""

from __future__ import annotations

import time
from itertools import count
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from rollout.cli.lib import find_run
from rollout.cli.lib.output import AsJson, console, print_json
from rollout.cli.lib.server_view import render_server
from rollout.core.errors import RolloutError


def status(
    run: find_run.Run = "",
    key: find_run.Key = "",
    ray: find_run.OverRay = False,
    address: find_run.Address = "auto",
    namespace: find_run.Namespace = "rollout",
    as_json: AsJson = False,
) -> None:
    """Show the state of every server, group and engine of a run.

    It answers also while a step runs.
    """
    found = find_run.find(run, key=key, ray=ray, address=address, namespace=namespace)
    states = {server.name: server.state() for server in found}
    if as_json:
        print_json(states)
        return
    for server in found:
        console().print(render_server(states[server.name], server.where))


def top(
    run: find_run.Run = "",
    key: find_run.Key = "",
    ray: find_run.OverRay = False,
    address: find_run.Address = "auto",
    namespace: find_run.Namespace = "rollout",
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two updates.")] = 1.0,
    num: Annotated[int, typer.Option(min=0, help="Number of updates; 0: until Ctrl-C.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Watch a run in the terminal."""
    found = find_run.find(run, key=key, ray=ray, address=address, namespace=namespace)
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        for number in count(1):
            if as_json:
                print_json({server.name: server.state() for server in found})
            else:
                live.update(Group(*(_rendered(server) for server in found)), refresh=True)
            if number == num:
                return
            time.sleep(every)


def _rendered(server: find_run.RunningServer) -> RenderableType:
    try:
        return render_server(server.state(), server.where)
    except RolloutError as error:  # it may answer again: keep watching
        return Text(f"{server.name}: {error}", style="red")
