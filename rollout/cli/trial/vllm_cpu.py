"""``rollout vllm-cpu``: real vLLM on a machine without a GPU, and its smoke test."""

from __future__ import annotations

import typer

from engines.cpu.vllm.installation import Installation
from engines.launch import EngineSpec
from engines.protocol import Endpoint
from engines.vllm.invocation import invocation
from rollout.cli.trial.cpu_engine import TAKES_MORE, Model, Port, Trial, add_commands

app = typer.Typer(help="Real vLLM without a GPU.", no_args_is_help=True)
TRIAL = Trial("vllm", "vllm-cpu", Installation, invocation)
add_commands(app, TRIAL)


@app.command(context_settings=TAKES_MORE)
def serve(context: typer.Context, model: Model, port: Port = 30000) -> None:
    """Serve MODEL on 127.0.0.1 until Ctrl-C; what follows ``--`` goes to vLLM as it is."""
    spec = EngineSpec(
        engine_id="cpu-0", kind=TRIAL.kind, model_path=model, log_path="", python=TRIAL.python
    )
    TRIAL.serve(spec, Endpoint("127.0.0.1", port), context.args)
