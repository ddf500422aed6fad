"""Colocated GRPO on a laptop: the whole loop, in one command.

A local Ray cluster, two embedded engines behind a router, and a trainer that learns two-digit
addition by reinforcement.  Engines and trainer use the memory in turns.  Each step is

    rollout -> pause_generation -> flush_cache -> release_memory_occupation -> train
            -> onload_weights -> update_weights -> verify -> onload_kv -> continue_generation

    python examples/colocated_grpo.py            # about two minutes on two cores
    python examples/colocated_grpo.py --skip-push  # never push: the accuracy stays as it is
    python examples/colocated_grpo.py --engine FILE  # on SGLang or vLLM, as tools/cpu_engines says
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import rollout
import yaml

from arithmetic import SAMPLING, held_out_sums, judge, make_splits, training_prompts
from grpo import GrpoTrainer
from options import (
    find_model,
    make_config,
    make_parser,
    next_commands,
    prepare_model,
    read_options,
)
from report import Report

# The CPU kernels of vLLM know no heads of 16.
MODELS: dict[str, dict[str, Any]] = {"vllm": {"head_dim": 32}}


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of the engines; those of ``make_config`` where no file has others."""
    return yaml.safe_load(args.engine.read_text()) if args.engine else {"kind": "embedded"}


def config(args: argparse.Namespace) -> rollout.RolloutConfig:
    # Without a push the engines need a backup of the weights that they release.
    more = engine(args) | {"weights_cpu_backup": args.skip_push}
    return make_config(args, f"colocated-grpo-{args.seed}", **more)


def train(args: argparse.Namespace, report: Report) -> None:
    """Steps of rollout, training and push, with an evaluation after each."""
    splits = make_splits(args.seed)
    held_out = held_out_sums(splits)
    trainer = GrpoTrainer(find_model(args), seed=args.seed)
    trainer.offload()

    with (
        rollout.launch(config(args), backend=args.backend) as deployment,
        rollout.Driver(deployment["policy"].url, judge) as driver,
    ):
        policy = deployment["policy"]

        def evaluate(step: int) -> dict[str, float]:
            return driver.evaluate(step, held_out).result().metrics

        report.begin(evaluate(0))
        for step in range(1, args.steps + 1):
            batch = training_prompts(splits, step, args.prompts)
            with report.timed("rollout"):
                groups = driver.rollout(
                    step, batch, group_size=args.group_size, sampling=SAMPLING
                ).result()

            with policy.offloaded() as window:
                with report.timed("train"):
                    trainer.onload()
                    metrics = trainer.step(groups)
                if not args.skip_push:
                    window.push(trainer.state_dict(), version=step)
                trainer.offload()

            with report.timed("eval"):
                scores = evaluate(step)
            report.step(step, metrics["reward"], scores, window.report)


def main() -> None:
    parser = make_parser(__doc__, "runs/colocated_grpo")
    parser.add_argument("--engine", type=Path, help="a file with other settings of the engines")
    parser.add_argument("--backend", default="ray", choices=["ray", "local"])
    parser.add_argument(
        "--skip-push", action="store_true", help="never push, as a negative control"
    )
    args = read_options(parser)
    report = Report(args.out / "colocated_grpo", args.steps)
    prepare_model(args, **MODELS.get(engine(args)["kind"], {}))
    with report:
        train(args, report)
    report.finish()
    print("next, in this folder:")
    for command, about in next_commands(config(args), args.out):
        print(f"  {command}  # {about}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: engines, router and cluster are stopped")
    except rollout.RolloutError as error:
        sys.exit(f"colocated_grpo: {error}")
