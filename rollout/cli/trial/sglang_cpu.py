"""``rollout sglang-cpu``: real SGLang on a machine without a GPU, and its smoke test."""

from __future__ import annotations

import typer

from engines.cpu.sglang.installation import Installation
from engines.launch import EngineSpec
from engines.protocol import Endpoint
from engines.sglang.invocation import invocation
from rollout.cli.trial.cpu_engine import (
    TAKES_MORE,
    Cpus,
    Host,
    MemorySaver,
    Model,
    Port,
    Trial,
    add_commands,
)

app = typer.Typer(help="Real SGLang without a GPU.", no_args_is_help=True)
TRIAL = Trial("sglang", "sglang-cpu", Installation, invocation)
add_commands(app, TRIAL)


@app.command(context_settings=TAKES_MORE)
def serve(
    context: typer.Context,
    model: Model,
    port: Port = 30000,
    host: Host = "127.0.0.1",
    cpus: Cpus = 1,
    memory_saver: MemorySaver = True,
) -> None:
    """Serve MODEL until Ctrl-C; what follows ``--`` goes to SGLang as it is."""
    spec = EngineSpec(
        engine_id="cpu-0",
        kind=TRIAL.kind,
        model_path=model,
        log_path="",
        num_cpus=cpus,
        memory_saver=memory_saver,
        python=TRIAL.python,
    )
    TRIAL.serve(spec, Endpoint(host, port), context.args)
