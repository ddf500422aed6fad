"""Colocated GRPO on a laptop: the whole loop, in one command.

A local Ray cluster, two embedded engines behind a router, and a trainer that learns two-digit
addition by reinforcement.  Engines and trainer use the memory in turns.  Each step is

    rollout -> pause -> flush -> release -> train -> resume weights -> push -> verify
            -> resume KV cache -> continue

    python examples/colocated_grpo.py            # about two minutes on two cores
    python examples/colocated_grpo.py --skip-push  # never push: the accuracy stays as it is
    python examples/colocated_grpo.py --engine sglang  # after `rollout sglang-cpu install`
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import rollout
import torch
from transformers.utils import logging as transformers_logging

from arithmetic import (
    MAX_NEW_TOKENS,
    judge,
    make_splits,
    make_warm_started_model,
    prompts,
)
from grpo import GrpoTrainer
from report import Report

OPTIONS = {"dtype": "float32", "max-total-tokens": 32768, "log-level": "warning"}
ENGINES: dict[str, dict[str, Any]] = {
    "embedded": {"kind": "embedded", "options": OPTIONS},
    # Runs in the environment that `rollout sglang-cpu install` creates.
    "sglang": {"kind": "sglang", "python": "sglang-cpu", "options": OPTIONS},
}


def config(args: argparse.Namespace, model_path: Path) -> rollout.RolloutConfig:
    """One server, the policy, whose engines release their memory in each step."""
    engine = {
        "cpus": 1,
        # Without a push the engines need a backup of the weights that they release.
        "weights_cpu_backup": args.skip_push,
        **ENGINES[args.engine],
    }
    return rollout.RolloutConfig.from_dict(
        {
            "run_id": f"colocated-grpo-{args.seed}",
            "log_dir": str(args.out / "logs"),
            "servers": {
                "policy": {
                    "model_path": str(model_path),
                    "groups": {"main": {"num_engines": args.engines, "engine": engine}},
                }
            },
        }
    )


def train(args: argparse.Namespace, model_path: Path, report: Report) -> None:
    """Steps of rollout, training and push, with an evaluation after each."""
    splits = make_splits(args.seed)
    sampling = rollout.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
    greedy = rollout.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0)
    held_out = {"addition": rollout.EvalDataset(prompts(splits.held_out), greedy)}
    trainer = GrpoTrainer(model_path, seed=args.seed)
    trainer.offload()
    torch.manual_seed(args.seed)

    with (
        rollout.launch(config(args, model_path), backend=args.backend) as deployment,
        rollout.Driver(deployment["policy"].url, judge) as driver,
    ):
        policy = deployment["policy"]

        def evaluate(step: int) -> dict[str, float]:
            return driver.evaluate(step, held_out).result().metrics

        report.begin(evaluate(0))
        for step in range(1, args.steps + 1):
            start = (step - 1) * args.prompts % len(splits.train)
            batch = prompts((splits.train * 2)[start : start + args.prompts])

            with report.timed("rollout"):
                groups = driver.rollout(
                    step, batch, group_size=args.group_size, sampling=sampling
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--prompts", type=int, default=32, help="prompts in a step")
    parser.add_argument("--group-size", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--engines", type=int, default=2, help="engines behind the router")
    parser.add_argument("--engine", default="embedded", choices=ENGINES, help="kind of the engines")
    parser.add_argument("--backend", default="ray", choices=["ray", "local"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--skip-push", action="store_true", help="never push, as a negative control"
    )
    parser.add_argument("--model", type=Path, help="start from this model directory")
    parser.add_argument("--out", type=Path, default=Path("runs/colocated_grpo"))
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()

    report = Report(args.out / "colocated_grpo", args.steps)
    model_path = args.model or args.out / f"model-{args.seed}"
    if args.model is None:
        with report.note("making and warm-starting a tiny Qwen3 model"):
            started = time.monotonic()
            make_warm_started_model(model_path, args.seed)
        report.print(f"warm start took {time.monotonic() - started:.1f} s")
    with report:
        train(args, model_path, report)
    report.finish()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: engines, router and cluster are stopped")
    except rollout.RolloutError as error:
        sys.exit(f"colocated_grpo: {error}")
