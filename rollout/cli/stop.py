"""``rollout stop``: stop the servers of a run."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from engines.process.process_identity import terminate
from engines.protocol import ProcessIdentity
from rollout.cli.lib.find_run import RunningServer
from rollout.cli.lib.output import print_json, show
from rollout.core.errors import RolloutError

_TIMEOUT_S = 60.0


def stop_servers(found: Sequence[RunningServer], *, yes: bool, as_json: bool) -> None:
    """Stop the servers, or the process that runs them, after a confirmation."""
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
        show(f"stopped: {names}")


def _terminate(process: ProcessIdentity) -> None:
    """Send SIGTERM and wait until the process has ended; the guards end its engines."""
    if not terminate(process, _TIMEOUT_S):
        raise RolloutError(
            f"process {process.pid} still runs {_TIMEOUT_S:g} s after SIGTERM; "
            f"kill -9 {process.pid} ends it, and the guards then end all its engines"
        )
