"""``rollout sglang-cpu``: real SGLang on a machine without a GPU."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from engines.errors import EngineError
from engines.launch import EngineSpec
from engines.ports import reserve_port
from engines.protocol import Endpoint
from engines.sglang.invocation import CACHED, invocation
from engines.sglang_cpu.installation import Installation
from engines.sglang_cpu.smoke import smoke_test

app = typer.Typer(help="Real SGLang without a GPU.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; what goes on is on stderr.")]


@app.command()
def install(as_json: AsJson = False) -> None:
    """Make the environment it runs in, once: 2 GB in the user's cache folder."""
    with told():
        made = Installation().make(partial(typer.echo, err=as_json))
        typer.echo(json.dumps({"python": str(made)}) if as_json else made)


@app.command()
def path(as_json: AsJson = False) -> None:
    """Print the interpreter of that environment."""
    with told():
        found = Installation().require()
        typer.echo(json.dumps({"python": str(found)}) if as_json else found)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Directory of a checkpoint, or its hub name.")],
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    cpus: Annotated[int, typer.Option(help="Cores to use.")] = 1,
    memory_saver: Annotated[bool, typer.Option(help="Let it release its memory.")] = True,
) -> None:
    """Serve MODEL until Ctrl-C; what follows ``--`` goes to SGLang as it is."""
    with told():
        Installation().make(typer.echo)
        reserve_port(host, port).release()  # SGLang would load for half a minute first
        spec = EngineSpec(
            engine_id="cpu-0",
            kind="sglang",
            model_path=model,
            log_path="",
            num_cpus=cpus,
            memory_saver=memory_saver,
            python=CACHED,
        )
        start = invocation(spec, Endpoint(host, port), os.environ)
        sys.stdout.flush()
        os.execve(start.command[0], [*start.command, *context.args], dict(start.env))


@app.command()
def smoke(as_json: AsJson = False) -> None:
    """Install it if need be, start a tiny model, take it through one step of training."""
    say = partial(typer.echo, err=as_json)
    with told():
        Installation().make(say)
        with tempfile.TemporaryDirectory(prefix="sglang-cpu-smoke-") as folder:
            seen = asyncio.run(smoke_test(Path(folder), say))
    if as_json:
        typer.echo(json.dumps(seen))


@contextmanager
def told() -> Iterator[None]:
    """A foreseen failure is one message and status 1."""
    try:
        yield
    except (EngineError, ValueError, OSError) as error:
        typer.echo(f"rollout sglang-cpu: {error}", err=True)
        raise typer.Exit(1) from None
