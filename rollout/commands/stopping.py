"""``rollout stop``: end a run, wherever it was started."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated

import psutil
import typer

from rollout.commands import sources
from rollout.commands.output import AsJson, console, print_json
from rollout.errors import RolloutError

_TIMEOUT_S = 60.0


def stop(
    run: sources.Run = "",
    key: sources.Key = "",
    ray: sources.OverRay = False,
    address: sources.Address = "auto",
    namespace: sources.Namespace = "rollout",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop the engines and routers of a run.

    Over Ray the server actors are told to.  Otherwise the process that runs the servers gets
    SIGTERM, which is the training script where that launched them.
    """
    found = sources.find(run, key=key, ray=ray, address=address, namespace=namespace)
    what = ", ".join(f"server {one.name} ({one.where})" for one in found)
    if not yes and not as_json and not typer.confirm(f"Stop {what}?"):
        raise typer.Abort
    pids = {one.pid for one in found if one.pid is not None}
    for one in found:
        if one.pid is None:
            one.stop()
    for pid in pids:
        _terminate(pid)
    if as_json:
        print_json({"stopped": [one.name for one in found]})
    else:
        console().print(f"stopped: {what}")


def _terminate(pid: int) -> None:
    """SIGTERM, and wait until it has cleared up; its engines' guards end with it."""
    try:
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGTERM)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            process.wait(0.5)
        except psutil.TimeoutExpired:
            continue
        return
    raise RolloutError(
        f"process {pid} has not ended {_TIMEOUT_S:g} s after SIGTERM; kill -9 {pid} ends it and, "
        "through their guards, all its engines"
    )
