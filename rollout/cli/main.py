"""The command ``rollout``; each command is a file of ``rollout/cli``.

Exit status: 0 done, 2 a setting is wrong, 3 ``doctor`` found a problem, 1 any other expected error,
130 interrupted.  An expected error (``RolloutError``) is printed as one message without a
traceback, after everything that the command started has been stopped.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import rollout
from rollout.cli import attach, doctor, plan, report, serve, status, stop, trace
from rollout.cli.lib.output import AsJson, console, print_json
from rollout.cli.quickstart import quickstart
from rollout.core.errors import ConfigError, RolloutError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True)
    ] = False,
) -> None:
    """Rollout orchestration for colocated RL post-training."""
    if show_version:
        version()
        raise typer.Exit


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": rollout.__version__})
    else:
        console().print(rollout.__version__)


for command in (
    *(plan.validate, plan.plan, plan.schema, serve.serve, status.status, status.top),
    doctor.doctor,
    *(stop.stop, attach.attach, trace.trace, report.report),
):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(quickstart)


def main() -> None:
    """Entry point: run a command; an expected error becomes one message and an exit status."""
    try:
        app()
    except RolloutError as error:
        print(f"rollout: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:  # the reader of the output has ended, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # of a file that the user named
        print(f"rollout: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
