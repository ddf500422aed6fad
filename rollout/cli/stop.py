"""``rollout stop``: stop the servers of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from engines.process.process_identity import terminate
from engines.protocol import ProcessIdentity
from rollout.cli.lib import find_run
from rollout.cli.lib.output import AsJson, console, print_json
from rollout.core.errors import RolloutError

_TIMEOUT_S = 60.0


def stop(
    run: find_run.Run = "",
    key: find_run.Key = "",
    ray: find_run.OverRay = False,
    address: find_run.Address = "auto",
    namespace: find_run.Namespace = "rollout",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop the engines and routers of a run.

    With --ray the server actors are stopped.  Otherwise the process that runs the servers gets
    SIGTERM; this is the training script if the script launched them.
    """
    found = find_run.find(run, key=key, ray=ray, address=address, namespace=namespace)
    names = ", ".join(f"server {server.name} ({server.where})" for server in found)
    if not yes and not as_json and not typer.confirm(f"Stop {names}?"):
        raise typer.Abort
    processes = {server.process for server in found if server.process is not None}
    for server in found:
        if server.process is None:
            server.stop()
    for process in processes:
        _terminate(process)
    if as_json:
        print_json({"stopped": [server.name for server in found]})
    else:
        console().print(f"stopped: {names}")


def _terminate(process: ProcessIdentity) -> None:
    """Send SIGTERM and wait until the process has ended; the guards end its engines."""
    if not terminate(process, _TIMEOUT_S):
        raise RolloutError(
            f"process {process.pid} still runs {_TIMEOUT_S:g} s after SIGTERM; "
            f"kill -9 {process.pid} ends it, and the guards then end all its engines"
        )
