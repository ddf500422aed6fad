"""The command ``rollout``; what each command does is in ``rollout/commands``.

Exit status: 0 done, 2 a setting is wrong, 3 ``doctor`` found something, 1 anything else that was
foreseen, 130 interrupted.  A foreseen error is one message without a traceback, and nothing is
left running.
"""

from __future__ import annotations

import sys

import typer

import rollout
from engines.sglang_cpu.commands import app as sglang_cpu
from rollout.commands import (
    attaching,
    benching,
    doctor,
    planning,
    reporting,
    serving,
    status,
    stopping,
)
from rollout.commands import tracing as traces
from rollout.commands.output import AsJson, console, print_json
from rollout.errors import ConfigError, RolloutError

app = typer.Typer(
    help="Rollout orchestration for colocated RL post-training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(sglang_cpu, name="sglang-cpu")


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": rollout.__version__})
    else:
        console().print(rollout.__version__)


app.command()(planning.validate)
app.command()(planning.plan)
app.command()(serving.serve)
app.command()(status.status)
app.command()(status.top)
app.command()(doctor.doctor)
app.command()(stopping.stop)
app.command()(attaching.attach)
app.command()(traces.trace)
app.command()(reporting.report)
app.command()(benching.bench)


def main() -> None:
    """Entry point: run a command, turn foreseen errors into one message and a status."""
    try:
        app()
    except ConfigError as error:
        _fail(str(error), 2)
    except RolloutError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str, status: int) -> None:
    print(f"rollout: {message}", file=sys.stderr)
    sys.exit(status)
