"""The command ``rollout``: what a user types, and the help; the work is a file for each command.

Always true: a command's file is imported when the command runs, so the help needs Typer alone.

Exit status: 0 done, 2 a setting is wrong, 3 ``doctor`` found a problem, 1 any other expected error,
130 interrupted.  An expected error (``RolloutError``) is printed as one message without a
traceback, after everything that the command started has been stopped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import rollout
from rollout.core.errors import ConfigError, RolloutError
from rollout.rules.diagnosis import LONG_S

if TYPE_CHECKING:
    from rollout.cli.lib.find_run import RunningServer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

Config = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE|KEY.PATH=VALUE",
        help="Files with the configuration (YAML, JSON, TOML), merged in this order; then settings "
        "that win over them, such as servers.policy.groups.main.num_engines=4.",
    ),
]
Backend = Annotated[str, typer.Option(help="'local': child processes of this one; 'ray': actors.")]

Run = Annotated[
    str,
    typer.Argument(
        help="The run: its folder, its id under ./runs (or $ROLLOUT_LOG_DIR), the URL of its page, "
        "or, with --ray, its id. Default: the only active run under ./runs."
    ),
]
Key = Annotated[str, typer.Option(envvar="ROLLOUT_KEY", help="Key of the page, if it needs one.")]
OverRay = Annotated[
    bool, typer.Option("--ray", help="Query the actors of the run, on the cluster of --address.")
]
Address = Annotated[str, typer.Option(help="Ray address, with --ray.")]
Namespace = Annotated[str, typer.Option(help="Ray namespace, with --ray.")]

LaunchId = Annotated[
    str, typer.Option("--launch", help="Id of a launch of the run; default: the last one.")
]
ListLaunches = Annotated[bool, typer.Option("--launches", help="Only list the launches.")]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

debug = typer.Typer(
    no_args_is_help=True,
    help="Run the rollout by itself, or the training.",
)
app.add_typer(debug, name="debug")


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
    from rollout.cli.lib.output import print_json

    if as_json:
        print_json({"version": rollout.__version__})
    else:
        typer.echo(rollout.__version__)


@app.command()
def validate(config: Config, as_json: AsJson = False) -> None:
    """List all mistakes of a configuration; start nothing.

    Folders that it names are checked too.
    Exit status 2 if there is one.
    """
    from rollout.cli.plan import print_mistakes

    print_mistakes(config, as_json=as_json)


@app.command()
def plan(
    config: Config,
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Size of the GPUs that memory sums are computed for. Default: the smallest of "
            "this machine, or else an H100 80 GB.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where engines run and what they need; start nothing.

    Also their ports, what an offload discards, its host memory, memory sums of the GPUs, and what
    engines are started with: variables, options and deadlines, and which of them the configuration
    overrides.

    Exit status 2 if a group would be refused; each refusal names the setting to change.
    """
    from rollout.cli.plan import print_plan

    print_plan(config, as_json=as_json, gpu_gib=gpu_gib)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration, for editors."""
    from rollout.cli.lib.output import print_json
    from rollout.config import RolloutConfig

    print_json(RolloutConfig.model_json_schema())


@app.command()
def serve(config: Config, backend: Backend = "local", as_json: AsJson = False) -> None:
    """Run engines, router and page without a trainer until Ctrl-C."""
    from rollout.cli.serve import serve_until_stopped

    serve_until_stopped(config, backend, as_json=as_json)


@app.command()
def status(
    run: Run = "",
    key: Key = "",
    ray: OverRay = False,
    address: Address = "auto",
    namespace: Namespace = "rollout",
    as_json: AsJson = False,
) -> None:
    """Show the state of every server, group and engine of a run.

    It answers also while a step runs.
    """
    from rollout.cli.status import print_status

    print_status(_find(run, key, ray, address, namespace), as_json=as_json)


@app.command()
def top(
    run: Run = "",
    key: Key = "",
    ray: OverRay = False,
    address: Address = "auto",
    namespace: Namespace = "rollout",
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two updates.")] = 1.0,
    num: Annotated[int, typer.Option(min=0, help="Number of updates; 0: until Ctrl-C.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Watch a run in the terminal."""
    from rollout.cli.status import watch

    watch(_find(run, key, ray, address, namespace), every_s=every, num=num, as_json=as_json)


@app.command()
def doctor(
    run: Run = "",
    key: Key = "",
    ray: OverRay = False,
    address: Address = "auto",
    namespace: Namespace = "rollout",
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds after which a phase counts as stuck.")
    ] = LONG_S,
    as_json: AsJson = False,
) -> None:
    """Explain why a run is stuck, and what to do.

    It names the engine and the call, since when, and shows the engine's stack and log.
    Exit status: 0 nothing is wrong, 3 something is wrong or stuck.
    """
    from rollout.cli.doctor import print_diagnosis

    print_diagnosis(_find(run, key, ray, address, namespace), patience, as_json=as_json)


@app.command()
def stop(
    run: Run = "",
    key: Key = "",
    ray: OverRay = False,
    address: Address = "auto",
    namespace: Namespace = "rollout",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop the engines and routers of a run.

    With --ray the server actors are stopped, and a detached run as a whole.  Otherwise the process
    that runs the servers gets SIGTERM; this is the training script if the script launched them.
    """
    from rollout.cli.stop import stop_servers

    stop_servers(_find(run, key, ray, address, namespace), yes=yes, as_json=as_json)


@app.command()
def attach(
    run: Annotated[str, typer.Argument(help="The run: its folder, or its id under ./runs.")],
    clean: Annotated[
        bool, typer.Option("--clean-up", help="Stop leftover engines that the run has launched.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the leftovers of a crashed run, and clean up.

    Engines stop with the process that launched them, so usually only attached engines still run.
    Without --clean-up nothing is changed; while the driver runs, --clean-up is refused.
    """
    from rollout.cli.attach import print_leftovers

    print_leftovers(run, clean=clean, as_json=as_json)


@app.command()
def trace(
    file: Annotated[
        Path, typer.Argument(help="A run folder, its id under ./runs, or one .spans.jsonl file.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File for the trace; default: trace.json.")
    ] = None,
    otel: Annotated[
        bool, typer.Option(help="Also export to the OTLP endpoint of the OTEL_* variables.")
    ] = False,
    launch: LaunchId = "",
    list_launches: ListLaunches = False,
    as_json: AsJson = False,
) -> None:
    """Write a trace for Perfetto, and print the time of each phase.

    Open the trace in ui.perfetto.dev or chrome://tracing. It shows one launch of the run.
    """
    if list_launches:
        _list_launches(file, as_json=as_json)
        return
    from rollout.cli.trace import write_trace

    write_trace(file, out, launch, has_otel=otel, as_json=as_json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or its id under ./runs.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Default: report.html in the run folder.")
    ] = None,
    launch: LaunchId = "",
    list_launches: ListLaunches = False,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file of a run: curves, phases, failures.

    It shows one launch of the run.
    """
    if list_launches:
        _list_launches(run, as_json=as_json)
        return
    from rollout.cli.report import write_report

    write_report(run, out, launch, as_json=as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def quickstart(context: typer.Context) -> None:
    """Train a tiny model with colocated GRPO on this machine.

    No GPU is needed.  Figures and model are written to runs/colocated_grpo in this folder.
    Further options are those of examples/colocated_grpo.py, for example --steps 5;
    `rollout quickstart -- --help` lists them.
    """
    from rollout.cli.quickstart import run_example

    run_example(context.args)


@debug.command("rollout")
def debug_rollout(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|KEY.PATH=VALUE|URL",
            help="Configuration to launch, in files and settings that win over them; or the URL of "
            "a router that serves already.",
        ),
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            help="JSON lines or Parquet, each row with prompt (a text, or messages) or prompt_ids; "
            "its other columns are the metadata."
        ),
    ],
    reward: Annotated[
        str, typer.Option(help="module:function, which is called with each sample.")
    ] = "",
    num: Annotated[int, typer.Option(min=1, help="Prompts to use, from the first.")] = 16,
    group_size: Annotated[int, typer.Option(min=1, help="Samples of each prompt.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sample.")] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File for the groups, as JSON lines.")
    ] = Path("groups.jsonl"),
    server: Annotated[
        str, typer.Option(help="Which server of the configuration; default: the first.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Folder with the tokenizer; default: the server's model_path.")
    ] = "",
    backend: Backend = "local",
    key: Annotated[str, typer.Option(help="Key of the router, its client_key.")] = "",
    as_json: AsJson = False,
) -> None:
    """Sample prompts without a trainer, and save the groups.

    It prints rewards, lengths, failures and some samples.
    """
    from rollout.cli.debug import Sampled, sample_prompts

    sampled = Sampled(prompts, reward, num, group_size, max_new_tokens, temperature)
    sample_prompts(
        source,
        sampled,
        out,
        server=server,
        model=model,
        backend=backend,
        key=key,
        as_json=as_json,
    )


@debug.command("record")
def debug_record(
    folder: Annotated[Path, typer.Argument(help="Gets a file for each step, STEP.jsonl.")],
    command: Annotated[list[str], typer.Argument(help="The training script, behind --.")],
) -> None:
    """Run a training script, and save the groups of its steps.

    The script is not changed: `rollout debug record FOLDER -- python my_train.py`.
    """
    from rollout.cli.debug import record_groups

    record_groups(folder, command)


@debug.command("train")
def debug_train(
    saved: Annotated[
        Path,
        typer.Argument(
            help="Folder of a recording, of which each step gets its own groups; or one file, "
            "whose groups every step gets."
        ),
    ],
    command: Annotated[list[str], typer.Argument(help="The training script, behind --.")],
) -> None:
    """Run a training script on saved groups, without engines.

    The script is not changed: `rollout debug train FOLDER -- python my_train.py`.
    Its driver returns the saved groups, and its launch starts fakes, which take pushes and need no
    GPU. Evaluations have zeros for figures.
    """
    from rollout.cli.debug import train_on_saved

    train_on_saved(saved, command)


@debug.command("samples")
def debug_samples(
    file: Annotated[Path, typer.Argument(help="A file of saved groups.")],
    num: Annotated[
        int, typer.Option(min=0, max=16, help="Samples, from the highest reward to the lowest.")
    ] = 4,
    as_json: AsJson = False,
) -> None:
    """Show saved groups: their figures, and some samples."""
    from rollout.cli.debug import print_samples

    print_samples(file, num, as_json=as_json)


def _find(run: str, key: str, ray: bool, address: str, namespace: str) -> list[RunningServer]:
    from rollout.cli.lib.find_run import find

    return find(run, key=key, ray=ray, address=address, namespace=namespace)


def _list_launches(run: Path, *, as_json: bool) -> None:
    from rollout.cli.lib.launches import show_launches
    from rollout.control.server.runs import recorded_run
    from rollout.observability.timeline.span_file import read_spans

    show_launches(read_spans(recorded_run(run)), as_json=as_json)


def main() -> None:
    """Entry point: run a command; an expected error becomes one message and an exit status."""
    try:
        if os.environ.get("ROLLOUT_LOG_LEVEL"):
            from rollout.config.sources.environment import log_to_stderr

            log_to_stderr()
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
