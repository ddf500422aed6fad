"""``rollout status`` and ``rollout top``: the state of a run, once or repeatedly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from rollout.cli.lib.find_run import RunningServer
from rollout.cli.lib.output import console, is_terminal, print_json, show
from rollout.cli.lib.server_view import render_server
from rollout.core.errors import RolloutError


def print_status(found: Sequence[RunningServer], *, as_json: bool) -> None:
    """Print the state of each server."""
    states = {server.name: server.state() for server in found}
    if as_json:
        print_json(states)
        return
    for server in found:
        show(render_server(states[server.name], server.where))


def watch(found: Sequence[RunningServer], *, every_s: float, num: int, as_json: bool) -> None:
    """Show the state of each server ``num`` times, or until Ctrl-C if it is 0.

    A terminal shows the last state; a pipe gets one below the other.
    """
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        for number in count(1):
            if as_json:
                print_json({server.name: server.state() for server in found})
            elif is_terminal():
                live.update(Group(*map(_rendered, found)), refresh=True)
            else:
                show(*map(_rendered, found))
            if number == num:
                return
            time.sleep(every_s)


def _rendered(server: RunningServer) -> RenderableType:
    try:
        return render_server(server.state(), server.where)
    except RolloutError as error:  # it may answer again: keep watching
        return Text(f"{server.name}: {error}", style="red")
