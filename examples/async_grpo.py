"""Fully asynchronous GRPO: engines generate while the trainer trains; weights are pushed between.

The colocated example takes turns with the memory; here engines keep theirs, as on GPUs of their
own.  A push cuts what is in flight; it goes on with the new weights, and each token keeps the
version that drew it.  Samples that are more than ``--max-lag`` versions behind are done anew.

    python examples/async_grpo.py                        # about two minutes on two cores
    python examples/async_grpo.py --dump runs/dumps      # keep every batch as Parquet
    python examples/async_grpo.py --replay runs/dumps    # train on them again, without engines
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import rollout
import torch
from rollout.driver.dump import Replay, save_groups
from rollout.driver.options import RolloutOptions
from rollout.driver.sources import PromptData

from arithmetic import MAX_NEW_TOKENS, encode, judge, make_splits, make_warm_started_model
from grpo import GrpoTrainer

SAMPLING = rollout.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)


def config(args: argparse.Namespace, model_path: Path) -> rollout.RolloutConfig:
    """Engines that keep their memory: nothing is offloaded, weights change while they serve."""
    options = {"dtype": "float32", "max-total-tokens": 32768, "log-level": "warning"}
    engine = {"kind": "embedded", "cpus": 1, "options": options}
    group = {"num_engines": args.engines, "needs_offload": False, "engine": engine}
    server = {"model_path": str(model_path), "groups": {"main": group}}
    return rollout.RolloutConfig.from_dict(
        {"log_dir": str(args.out / "logs"), "servers": {"policy": server}}
    )


def learn(trainer: GrpoTrainer, step: int, groups: Sequence[rollout.SampleGroup]) -> None:
    metrics = trainer.step([group.samples for group in groups])
    print(f"step {step:2d}  reward {metrics['reward']:.3f}  kl {metrics['kl']:.5f}", flush=True)


def train(args: argparse.Namespace, model_path: Path, trainer: GrpoTrainer) -> None:
    """Batches from the driver while it makes the next ones."""
    data = PromptData(
        [
            {"input_ids": encode(problem.prompt), "answer": problem.answer}
            for problem in make_splits(args.seed).train
        ],
        seed=args.seed,
    )
    options = RolloutOptions(mode="async", over_sampling=1.5, max_version_lag=args.max_lag)
    figures: dict[str, float] = {}
    with (
        rollout.launch(config(args, model_path), backend=args.backend) as deployment,
        rollout.Driver(
            deployment["policy"].url, judge, on_metrics=lambda _, told: figures.update(told)
        ) as driver,
    ):
        policy = deployment["policy"]
        for step in range(1, args.steps + 1):
            groups = driver.rollout(
                step,
                data,
                num_groups=args.prompts,
                group_size=args.group_size,
                sampling=SAMPLING,
                options=options,
                weight_version=policy.weight_version,
            ).result()
            if args.dump:
                save_groups(args.dump / f"{step:06}.parquet", step, groups)
            learn(trainer, step, groups)
            policy.sync_weights(trainer.state_dict(), version=step).result()
        lags = {key: num for key, num in figures.items() if "version_lag" in key}
        print(f"last batch: {lags}, waited {figures['rollout/seconds']:.2f} s for it")


def replay(args: argparse.Namespace, trainer: GrpoTrainer) -> None:
    """The same training from dumps."""
    dumps = Replay(args.replay)
    for step in dumps.rollout_ids[: args.steps]:
        learn(trainer, step, dumps.rollout(step))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--prompts", type=int, default=32, help="prompts in a step")
    parser.add_argument("--group-size", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--engines", type=int, default=1, help="engines behind the router")
    parser.add_argument("--max-lag", type=int, default=2, help="versions a token may be behind")
    parser.add_argument("--backend", default="local", choices=["ray", "local"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="start from this directory, make none")
    parser.add_argument("--dump", type=Path, help="write each batch into this directory")
    parser.add_argument("--replay", type=Path, help="train on a dump or a directory of them")
    parser.add_argument("--out", type=Path, default=Path("runs/async_grpo"))
    args = parser.parse_args(arguments)
    args.out = args.out.absolute()
    for folder in filter(None, (args.out, args.dump)):
        folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model_path = args.model or args.out / f"model-{args.seed}"
    if args.model is None:
        make_warm_started_model(model_path, args.seed)
    trainer = GrpoTrainer(model_path, seed=args.seed)
    if args.replay:
        replay(args, trainer)
    else:
        train(args, model_path, trainer)


if __name__ == "__main__":
    main()
