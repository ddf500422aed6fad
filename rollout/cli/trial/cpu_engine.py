"""The commands of an engine that runs on CPUs in an environment of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import rollout.testing
from engines import launch
from engines.process.cached_environment import CachedEnvironment, recipe_of, run
from engines.process.tcp_ports import reserve_port
from engines.protocol import Endpoint, MemoryTag, PauseMode, SamplingParams
from engines.protocol.errors import EngineError
from engines.protocol.kind import Kind
from engines.protocol.plain_text import size_text
from engines.protocol.spec import EngineSpec

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; progress is on stderr.")]
Model = Annotated[str, typer.Argument(help="Directory of a checkpoint, or its hub name.")]
Port = Annotated[int, typer.Option(help="Port to listen on.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Cpus = Annotated[int, typer.Option(help="Cores to use.")]
MemorySaver = Annotated[bool, typer.Option(help="Let it release its memory.")]
_PROMPT = tuple(b"Once upon a time")
_GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
_RELEASED = (MemoryTag.KV_CACHE, MemoryTag.WEIGHTS)


def commands_of(kind: Kind) -> typer.Typer:
    """``install``, ``path``, ``smoke`` and ``serve`` of a kind, in its cached interpreter."""
    app = typer.Typer(help=f"Real {kind.title} without a GPU.", no_args_is_help=True)

    @app.command()
    def install(as_json: AsJson = False) -> None:
        """Make the environment it runs in, once: 2 GB in the user's cache folder."""
        with _reported_errors(kind):
            made = _environment(kind).make(partial(typer.echo, err=as_json))
            typer.echo(json.dumps({"python": str(made)}) if as_json else made)

    @app.command()
    def path(as_json: AsJson = False) -> None:
        """Print the interpreter of that environment."""
        with _reported_errors(kind):
            found = _environment(kind).require()
            typer.echo(json.dumps({"python": str(found)}) if as_json else found)

    @app.command()
    def smoke(as_json: AsJson = False) -> None:
        """Install it if needed, start a tiny model, run one step of training on it."""
        report = partial(typer.echo, err=as_json)
        with _reported_errors(kind):
            python = _environment(kind).make(report)
            with tempfile.TemporaryDirectory(prefix=f"{kind.cpu_python}-smoke-") as folder:
                seen = asyncio.run(smoke_test(kind, python, Path(folder), report))
        if as_json:
            typer.echo(json.dumps(seen))

    @app.command(
        help=f"Serve MODEL until Ctrl-C; what follows ``--`` goes to {kind.title} as it is.",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def serve(
        context: typer.Context,
        model: Model,
        port: Port = 30000,
        host: Host = "127.0.0.1",
        cpus: Cpus = 1,
        memory_saver: MemorySaver = True,
    ) -> None:
        with _reported_errors(kind):
            _environment(kind).make(typer.echo)
            # The engine would load for half a minute first.
            reserve_port(host, port).release()
            spec = EngineSpec(
                engine_id="cpu-0",
                kind=kind.name,
                model_path=model,
                log_path="",
                num_cpus=cpus,
                memory_saver=memory_saver,
                python=kind.cpu_python,
            )
            start = launch.invocation(spec, Endpoint(host, port), os.environ)
            sys.stdout.flush()
            os.execve(start.command[0], [*start.command, *context.args], dict(start.env))

    return app


@contextmanager
def _reported_errors(kind: Kind) -> Iterator[None]:
    """An expected failure is one message and status 1."""
    try:
        yield
    except (EngineError, ValueError, OSError) as error:
        typer.echo(f"rollout {kind.cpu_python}: {error}", err=True)
        raise typer.Exit(1) from None


def _environment(kind: Kind) -> CachedEnvironment:
    recipe = recipe_of(kind.cpu_python)
    assert recipe is not None
    return CachedEnvironment(recipe)


def make_model(python: Path, path: Path, seed: int) -> Path:
    """A tiny random model, made by that interpreter: torch need not be in this one."""
    module = Path(rollout.testing.__file__).with_name("tiny_model.py")
    code = f"import runpy; runpy.run_path({str(module)!r})['make_tiny_model']({str(path)!r}"
    # Heads of 32, the smallest that the CPU kernels of vLLM know.
    run([str(python), "-c", f"{code}, seed={seed}, hidden_size=128)"])
    return path


async def smoke_test(
    kind: Kind, python: Path, folder: Path, report: Callable[[str], None]
) -> dict[str, float]:
    """Release the weights, load others, check that replies change; returns the measurements.

    Raises:
        EngineError: the engine did not start, refused a call, or did not do it.
    """
    first, second = (make_model(python, folder / f"model-{seed}", seed) for seed in (0, 1))
    started = time.monotonic()
    spec = EngineSpec(
        engine_id="smoke-0",
        kind=kind.name,
        model_path=str(first),
        log_path=str(folder / "engine.log"),
        options={"dtype": "float32"},
        python=kind.cpu_python,
    )
    running = await launch.LocalLauncher().launch(spec)
    client = kind.client(running.endpoint, engine_id=spec.engine_id)
    try:
        ready_s = time.monotonic() - started
        report(f"ready after {ready_s:.0f} s")
        before = await client.generate(input_ids=_PROMPT, sampling_params=_GREEDY)
        await client.pause_generation(PauseMode.ABORT)
        await client.flush_cache(timeout_s=10.0)
        held = await running.resident_bytes() or 0
        await client.release_memory_occupation(_RELEASED)
        freed = held - (await running.resident_bytes() or 0)
        await client.resume_memory_occupation([MemoryTag.WEIGHTS])
        await client.update_weights_from_disk(str(second), weight_version="1")
        await client.resume_memory_occupation([MemoryTag.KV_CACHE])
        await client.continue_generation()
        after = await client.generate(input_ids=_PROMPT, sampling_params=_GREEDY)
        report(f"released {size_text(freed)}")
        report(f"version {before.weight_version}: {before.output_ids}")
        report(f"version {after.weight_version}: {after.output_ids}")
        if freed <= 0 or after.weight_version != "1" or after.output_ids == before.output_ids:
            raise EngineError("the engine answered, but did not do it", operation="smoke")
    finally:
        await client.aclose()
        await running.stop(10.0)
    report("ok")
    return {"ready_s": ready_s, "freed_bytes": freed}
