"""The command ``rollout``.

Exit status: 0 done, 2 a setting is wrong, 1 anything else that was foreseen, 130 interrupted.
A foreseen error is one message without a traceback, and nothing is left running.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

import rollout
from engines.sglang_cpu.commands import app as sglang_cpu
from rollout.config import RolloutConfig, check_paths
from rollout.errors import ConfigError, RolloutError
from rollout.placement import plan_placement
from rollout.policy import release_policy
from rollout.types import ServerStatus

app = typer.Typer(
    help="Rollout orchestration for colocated RL post-training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(sglang_cpu, name="sglang-cpu")
console = Console()
ConfigPath = Annotated[Path, typer.Argument(help="YAML or JSON file with the configuration.")]


@app.command()
def version() -> None:
    """Print the version."""
    console.print(rollout.__version__)


@app.command()
def validate(config: ConfigPath) -> None:
    """Check a configuration and the directories it names; start nothing."""
    loaded = _load(config)
    console.print(f"{config}: {len(loaded.servers)} server(s), nothing wrong")


@app.command()
def plan(config: ConfigPath) -> None:
    """Show what would be started where, and what each group may forget when it is offloaded."""
    loaded = _load(config)
    placement = plan_placement(
        {name: server.groups for name, server in loaded.servers.items()},
        trainer_gpus=loaded.cluster.trainer_gpus,
    )
    table = Table("server", "group", "engines", "GPUs each", "offloads", "weights come back from")
    for name, server in loaded.servers.items():
        for group, of_group in server.groups.items():
            policy = release_policy(
                f"servers.{name}.groups.{group}", of_group, server.weights.update
            )
            table.add_row(
                name,
                group,
                f"{of_group.num_engines} {of_group.engine.kind}",
                str(of_group.engine.gpus),
                "yes" if of_group.needs_offload else "no",
                policy.weights_from,
            )
    console.print(table)
    needs = ", ".join(f"{amount:g} {name}" for name, amount in placement.totals().items())
    console.print(f"needs {needs}; the trainer shares the first {placement.shared} GPU bundles")


@app.command()
def serve(
    config: ConfigPath,
    backend: Annotated[
        str, typer.Option(help="'local': child processes of this one; 'ray': actors.")
    ] = "local",
) -> None:
    """Run engines and routers without a trainer until Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    loaded = _load(config)
    chosen: Literal["local", "ray"] = "ray" if backend == "ray" else "local"
    if backend != chosen:
        raise ConfigError(f"--backend {backend!r}: must be 'local' or 'ray'")
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    with rollout.launch(loaded, backend=chosen) as deployment:
        for name, status in deployment.status().result().items():
            _show(name, status)
        console.print("serving; Ctrl-C ends it")
        done.wait()


def _show(name: str, status: ServerStatus) -> None:
    table = Table(
        "group", "engine", "url", "state", "weight version", title=f"{name}: {status.router_url}"
    )
    for group in status.groups:
        for engine in group.engines:
            table.add_row(
                group.name,
                engine.engine_id,
                engine.endpoint.url,
                engine.state,
                str(engine.weight_version),
            )
    console.print(table)


def _load(path: Path) -> RolloutConfig:
    loaded = RolloutConfig.from_file(path)
    check_paths(loaded)
    return loaded


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
