"""Colocated GRPO with Ray: the trainer's ranks are actors in one placement group with the engines.

The task is that of ``colocated_grpo.py``, the trainer that of ``fsdp2_grpo.py``.  This process
generates the samples and divides them among the ranks.  All of it runs on CPUs, a rank and an
engine in each bundle; with GPUs, ``deployment.trainer_slots`` names the bundle of each rank.

    python examples/ray_trainer_grpo.py    # about two minutes on two cores
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from typing import Any

import ray
import rollout
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from arithmetic import SAMPLING, held_out_sums, judge, make_splits, training_prompts
from fsdp2_grpo import ShardedTrainer
from options import find_model, make_config, make_parser, prepare_model, read_options
from report import Report


class Rank:
    """One rank of the trainer."""

    def free_address(self) -> str:
        """Where the ranks can meet; of rank 0."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"

    def start(self, rank: int, address: str, args: argparse.Namespace, run_id: str) -> None:
        torch.set_num_threads(1)
        meet = f"tcp://{address}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=args.engines)
        self.trainer = ShardedTrainer(find_model(args), args.seed)
        self.pusher = rollout.connect(run_id, backend="ray")["policy"].pusher()

    def step(
        self, groups: Sequence[rollout.SampleGroup], version: int
    ) -> tuple[float, rollout.StepReport]:
        """Train on the samples of this rank, and push; the mean reward, and the push's report."""
        self.trainer.onload()
        metrics = self.trainer.step([group.samples for group in groups])
        report = self.pusher.push(self.trainer.model.state_dict(), version=version)
        self.trainer.offload()
        return metrics["reward"], report


def start_ranks(group: Any, args: argparse.Namespace, run_id: str) -> list[Any]:
    """One rank in each bundle."""
    ranks = []
    for bundle in range(args.engines):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        actor = ray.remote(num_cpus=1, scheduling_strategy=place)(Rank)
        ranks.append(actor.remote())
    address = ray.get(ranks[0].free_address.remote())
    ray.get([one.start.remote(rank, address, args, run_id) for rank, one in enumerate(ranks)])
    return ranks


def train(args: argparse.Namespace, report: Report) -> None:
    """Steps of rollout, training and push, with an evaluation after each."""
    splits = make_splits(args.seed)
    held_out = held_out_sums(splits)
    group = ray.util.placement_group([{"CPU": 2}] * args.engines)
    config = make_config(args, f"ray-trainer-grpo-{args.seed}")
    with (
        rollout.launch(
            config, backend="ray", placement_group=group, bundles=range(args.engines)
        ) as deployment,
        rollout.Driver(deployment["policy"].url, judge) as driver,
    ):
        policy = deployment["policy"]
        ranks = start_ranks(group, args, config.run_id)
        report.begin(driver.evaluate(0, held_out).result().metrics)
        for step in range(1, args.steps + 1):
            batch = training_prompts(splits, step, args.prompts)
            with report.timed("rollout"):
                groups = driver.rollout(
                    step, batch, group_size=args.group_size, sampling=SAMPLING
                ).result()
            offloaded = policy.offload().result()
            with report.timed("train"):
                steps = [
                    one.step.remote(groups[rank :: len(ranks)], step)
                    for rank, one in enumerate(ranks)
                ]
                rewards, reports = zip(*ray.get(steps), strict=True)
            with report.timed("eval"):
                scores = driver.evaluate(step, held_out).result().metrics
            report.step(step, sum(rewards) / len(rewards), scores, offloaded.merged(reports[0]))


def main() -> None:
    args = read_options(make_parser(__doc__, "runs/ray_trainer_grpo"))
    report = Report(args.out / "ray_trainer_grpo", args.steps)
    prepare_model(args)
    # Ray counts CPUs, and need not have them: this runs on smaller machines, too.
    ray.init("local", num_cpus=2 * args.engines, include_dashboard=False, log_to_driver=False)
    with report:
        train(args, report)
    report.finish()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: engines, router, ranks and cluster are stopped")
    except (rollout.RolloutError, ray.exceptions.RayError) as error:
        sys.exit(f"ray_trainer_grpo: {error}")
