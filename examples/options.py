"""What the programs that train on ``arithmetic.py`` share: options, model, engines."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import rollout
import torch
import yaml
from rich.console import Console
from transformers.utils import logging as transformers_logging

from arithmetic import make_warm_started_model

ENGINE_OPTIONS = {"dtype": "float32", "max-total-tokens": 32768, "log-level": "warning"}


def make_parser(description: str, out: str, *, num_steps: int = 20) -> argparse.ArgumentParser:
    """The options that all have; ``out`` is the default of the folder for results."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=num_steps, help="training steps")
    parser.add_argument("--prompts", type=int, default=32, help="prompts in a step")
    parser.add_argument("--group-size", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--engines", type=int, default=2, help="engines behind the router")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="start from this model directory")
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of this process, which uses one thread of torch."""
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    transformers_logging.disable_progress_bar()
    return args


def find_model(args: argparse.Namespace) -> Path:
    """The model to start from."""
    path: Path = args.model or args.out / f"model-{args.seed}"
    return path


def prepare_model(args: argparse.Namespace, **model: Any) -> None:
    """Make the model, unless ``--model`` names one; ``model`` as ``make_warm_started_model``."""
    if args.model is None:
        started = time.monotonic()
        with Console().status("making and warm-starting a tiny Qwen3 model"):
            make_warm_started_model(find_model(args), args.seed, **model)
        print(f"warm start took {time.monotonic() - started:.1f} s", flush=True)


def make_config(
    args: argparse.Namespace, run_id: str, weights: dict[str, Any] | None = None, **engine: Any
) -> rollout.RolloutConfig:
    """One server, the policy, whose engines release their memory in each step."""
    engine = {"kind": "embedded", "cpus": 1, "options": ENGINE_OPTIONS} | engine
    group = {"num_engines": args.engines, "engine": engine}
    model_path = str(find_model(args).resolve())
    server = {"model_path": model_path, "weights": weights or {}, "groups": {"main": group}}
    return rollout.RolloutConfig.from_dict(
        {"run_id": run_id, "log_dir": str(args.out / "logs"), "servers": {"policy": server}}
    )


def next_commands(config: rollout.RolloutConfig, folder: Path) -> list[tuple[str, str]]:
    """Write the configuration into this folder; two commands that use it, as they work from here,
    each with what it does."""
    path = folder / "rollout.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    installed = Path(sys.executable).with_name("rollout")
    if shutil.which("rollout") == str(installed):
        program = ["rollout"]
    else:
        program = (
            [_from_here(installed)] if installed.exists() else [sys.executable, "-m", "rollout"]
        )
    abouts = {
        "plan": "what runs where, and how it is started",
        "serve": "engines with this model, router and live page; Ctrl-C stops them",
    }
    return [
        (shlex.join([*program, name, _from_here(path)]), about) for name, about in abouts.items()
    ]


def _from_here(path: Path) -> str:
    """The path, relative where it lies below the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
