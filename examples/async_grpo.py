"""Asynchronous GRPO: engines generate while the trainer trains.

In ``colocated_grpo.py`` engines and trainer share their memory; here the engines keep theirs, as on
separate GPUs.  A push interrupts the requests in flight, and they continue with the new weights;
each token records the weight version that sampled it.  A sample that is more than ``--max-lag``
versions behind is generated again.

    python examples/async_grpo.py                        # about two minutes on two cores
    python examples/async_grpo.py --checkpoint runs/last # may be killed, and continues
    python examples/async_grpo.py --dump runs/dumps      # keep every batch as Parquet
    python examples/async_grpo.py --replay runs/dumps    # train on them again, without engines
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import rollout
import torch
from rollout.driver import PromptData, RolloutOptions, groups_of, sample_rows

from arithmetic import MAX_NEW_TOKENS, encode, judge, make_splits, make_warm_started_model
from grpo import GrpoTrainer

SAMPLING = rollout.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)


def config(args: argparse.Namespace, model_path: Path) -> rollout.RolloutConfig:
    """Engines that keep their memory and get new weights while they serve."""
    options = {"dtype": "float32", "max-total-tokens": 32768, "log-level": "warning"}
    engine = {"kind": "embedded", "cpus": 1, "options": options}
    group = {"num_engines": args.engines, "needs_offload": False, "engine": engine}
    server = {"model_path": str(model_path), "groups": {"main": group}}
    return rollout.RolloutConfig.from_dict(
        {"log_dir": str(args.out / "logs"), "servers": {"policy": server}}
    )


def learn(trainer: GrpoTrainer, step: int, groups: Sequence[rollout.SampleGroup]) -> None:
    """Train on one batch and print its figures."""
    metrics = trainer.step(groups)
    print(f"step {step:2d}  reward {metrics['reward']:.3f}  kl {metrics['kl']:.5f}", flush=True)


def train(args: argparse.Namespace, model_path: Path, trainer: GrpoTrainer) -> None:
    """Train on each batch while the driver generates the next ones."""
    data = PromptData(
        [
            {"input_ids": encode(problem.prompt), "answer": problem.answer}
            for problem in make_splits(args.seed).train
        ],
        seed=args.seed,
    )
    options = RolloutOptions(mode="async", over_sampling=1.5, max_version_lag=args.max_lag)
    figures: dict[str, float] = {}  # of the last batch
    done = load(args.checkpoint, trainer) if args.checkpoint else 0
    with (
        rollout.launch(
            config(args, model_path), backend=args.backend, expect_version=done
        ) as deployment,
        rollout.Driver(
            deployment["policy"].url,
            judge,
            on_metrics=lambda _, metrics: figures.update(metrics),
            journal=args.checkpoint and args.checkpoint / "journal",
        ) as driver,
    ):
        policy = deployment["policy"]
        if done:
            policy.push(trainer.state_dict(), version=done).result()
        for step in range(done + 1, args.steps + 1):
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
                dump(args.dump / f"{step:06}.parquet", groups)
            learn(trainer, step, groups)
            policy.push(trainer.state_dict(), version=step).result()
            if args.checkpoint:
                driver.state_of(data)  # the journal forgets what is older than the last two saves
                save(args.checkpoint, trainer, step)
    # A driver that is closed has given all figures to on_metrics.
    lags = {name: value for name, value in figures.items() if "version_lag" in name}
    print(f"last batch: {lags}, waited {figures['rollout/seconds']:.2f} s for it")


def save(folder: Path, trainer: GrpoTrainer, step: int) -> None:
    """Replace the checkpoint at once, so that a crash leaves the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    torch.save({"step": step, **state}, folder / "part.pt")
    (folder / "part.pt").replace(folder / "trainer.pt")


def load(folder: Path, trainer: GrpoTrainer) -> int:
    """Continue from the checkpoint, if there is one; returns its step."""
    if not (folder / "trainer.pt").exists():
        return 0
    state = torch.load(folder / "trainer.pt")
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def dump(file: Path, groups: Sequence[rollout.SampleGroup]) -> None:
    import datasets  # seconds, which a run without dumps saves

    datasets.Dataset.from_list(sample_rows(groups)).to_parquet(file)


def replay(args: argparse.Namespace, trainer: GrpoTrainer) -> None:
    """Repeat the training from dumped batches."""
    import datasets

    for file in sorted(args.replay.glob("*.parquet"))[: args.steps]:
        learn(trainer, int(file.stem), groups_of(datasets.Dataset.from_parquet(str(file))))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--prompts", type=int, default=32, help="prompts in a step")
    parser.add_argument("--group-size", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--engines", type=int, default=1, help="engines behind the router")
    parser.add_argument(
        "--max-lag", type=int, default=2, help="versions that a token may be behind"
    )
    parser.add_argument("--backend", default="local", choices=["ray", "local"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="start from this model directory")
    parser.add_argument("--checkpoint", type=Path, help="save each step here, and continue there")
    parser.add_argument("--dump", type=Path, help="write each batch into this directory")
    parser.add_argument("--replay", type=Path, help="train on a directory of dumped batches")
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
