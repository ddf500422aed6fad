"""Colocated GRPO with FSDP2: every rank generates its samples, trains, and pushes its shards.

The task is that of ``colocated_grpo.py``.  Rank 0 launches the engines, and all ranks connect to
them.  FSDP2 averages the gradients of the ranks, here over gloo.

    torchrun --nproc-per-node 2 examples/fsdp2_grpo.py    # about two minutes on two cores
"""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import rollout
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from arithmetic import SAMPLING, held_out_sums, judge, make_splits, training_prompts
from grpo import GrpoTrainer
from options import find_model, make_config, make_parser, prepare_model, read_options
from report import Report


class ShardedTrainer(GrpoTrainer):
    """Trains a model whose parameters are divided among all ranks."""

    def __init__(self, model_path: Path, seed: int) -> None:
        super().__init__(model_path, seed=seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        # Its parameters are other objects now.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.config.learning_rate, weight_decay=0.0
        )


def train(args: argparse.Namespace, report: Report) -> None:
    """Steps of rollout, training and push, with an evaluation by rank 0 after each."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    config = make_config(args, f"fsdp2-grpo-{args.seed}")
    splits = make_splits(args.seed)
    held_out = held_out_sums(splits)
    trainer = ShardedTrainer(find_model(args), args.seed)
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(rollout.launch(config))
        dist.barrier()  # the engines serve
        policy = rollout.connect(Path(config.log_dir) / config.run_id)["policy"]
        driver = stack.enter_context(rollout.Driver(policy.url, judge))
        pusher = stack.enter_context(policy.pusher())
        if rank == 0:
            report.begin(driver.evaluate(0, held_out).result().metrics)
        for step in range(1, args.steps + 1):
            batch = training_prompts(splits, step, args.prompts)[rank::num_ranks]
            with report.timed("rollout"):
                groups = driver.rollout(
                    step, batch, group_size=args.group_size, sampling=SAMPLING
                ).result()

            # When no rank needs the engines any more.
            offloaded = pusher.offload(rank_timeout_s=600)
            with report.timed("train"):
                trainer.onload()
                metrics = trainer.step([group.samples for group in groups])
            pushed = pusher.push(trainer.model.state_dict(), version=step)
            trainer.offload()

            reward = torch.tensor(metrics["reward"])
            dist.all_reduce(reward)
            if rank == 0:
                with report.timed("eval"):
                    scores = driver.evaluate(step, held_out).result().metrics
                report.step(step, reward.item() / num_ranks, scores, offloaded.merged(pushed))


def main() -> None:
    parser = make_parser(__doc__, "runs/fsdp2_grpo")
    args = read_options(parser)
    if not dist.is_torchelastic_launched():
        parser.error("start it as: torchrun --nproc-per-node 2 examples/fsdp2_grpo.py")
    # torchrun ends the other ranks with SIGTERM if one has failed: they clean up, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    report = Report(args.out / "fsdp2_grpo", args.steps, is_quiet=not is_first)
    if is_first:
        prepare_model(args)
    dist.barrier()
    with report:
        train(args, report)
    if is_first:
        report.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: engines and router are stopped")
    except rollout.RolloutError as error:
        sys.exit(f"fsdp2_grpo: {error}")
