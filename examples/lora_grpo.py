"""GRPO of a LoRA adapter: only the adapter is trained and pushed.

The engines share their memory with the trainer, as in ``colocated_grpo.py``.  While they are
offloaded, their base weights are in host memory; that they come back bit-equal is verified.  A push
has only the adapter, a few per cent of the model.

    python examples/lora_grpo.py                # about a minute on two cores
    python examples/lora_grpo.py --merge        # push base and adapter merged, as full weights
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import rollout
import torch
from rollout import merged

from arithmetic import SAMPLING, held_out_sums, judge, make_splits, training_prompts
from grpo import GrpoConfig, GrpoTrainer
from options import (
    ENGINE_OPTIONS,
    find_model,
    make_config,
    make_parser,
    prepare_model,
    read_options,
)

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(torch.nn.Module):
    """``base(x) + scale * up(down(x))``; only ``down`` and ``up`` learn."""

    def __init__(self, base: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base
        self.scale = scale
        self.down = torch.nn.Parameter(torch.empty(rank, base.in_features))
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank))
        torch.nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * ((x @ self.down.t()) @ self.up.t())


class LoraTrainer(GrpoTrainer):
    """Trains an adapter beside a model that does not change."""

    def __init__(self, model_path: Path, rank: int, config: GrpoConfig, seed: int) -> None:
        super().__init__(model_path, config, seed)
        self.base = {name: value.detach() for name, value in self.model.named_parameters()}
        # In PEFT's format, which the engines read.
        self.adapter_config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": list(TARGETS),
        }
        self._layers: dict[str, LoraLinear] = {}
        self.model.requires_grad_(False)
        for name, module in list(self.model.named_modules()):
            if name.rpartition(".")[2] in TARGETS:
                parent, _, child = name.rpartition(".")
                layer = LoraLinear(module, rank, scale=2.0)
                setattr(self.model.get_submodule(parent), child, layer)
                self._layers[name] = layer
        trained = [half for layer in self._layers.values() for half in (layer.down, layer.up)]
        self.optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=0.0)

    def adapter(self) -> dict[str, torch.Tensor]:
        """The adapter under PEFT's names; views that the next step changes."""
        named = {}
        for name, layer in self._layers.items():
            named[f"base_model.model.{name}.lora_A.weight"] = layer.down.detach()
            named[f"base_model.model.{name}.lora_B.weight"] = layer.up.detach()
        return named


def config(args: argparse.Namespace) -> rollout.RolloutConfig:
    """Engines that load adapters."""
    options = ENGINE_OPTIONS | {"enable-lora": True, "max-lora-rank": args.rank}
    return make_config(args, f"lora-grpo-{args.seed}", {"update": "lora"}, options=options)


def train(args: argparse.Namespace) -> None:
    """Steps of rollout, training of the adapter, and a push of the adapter alone."""
    splits = make_splits(args.seed)
    held_out = held_out_sums(splits)
    learning = GrpoConfig(learning_rate=2e-3)
    trainer = LoraTrainer(find_model(args), args.rank, learning, args.seed)
    adapter_bytes = sum(tensor.nbytes for tensor in trainer.adapter().values())
    base_bytes = sum(tensor.nbytes for tensor in trainer.base.values())

    with (
        rollout.launch(config(args), backend=args.backend) as deployment,
        rollout.Driver(deployment["policy"].url, judge) as driver,
    ):
        policy = deployment["policy"]
        differs = policy.checks.base_differs(trainer.base)
        if differs:
            policy.push(policy.phases.make_push(trainer.base, is_base=True)).result()
        print(f"base {base_bytes / 2**20:.1f} MiB, {'pushed' if differs else 'as on disk'}")
        if not args.merge:
            print(f"adapter {adapter_bytes / 2**20:.2f} MiB, {adapter_bytes / base_bytes:.1%}")

        def evaluate(step: int) -> float:
            return driver.evaluate(step, held_out).result().metrics["eval/addition"]

        before = accuracy = evaluate(0)
        print(f"before training: accuracy {before:.1%} on held-out sums")
        for step in range(1, args.steps + 1):
            batch = training_prompts(splits, step, args.prompts)
            groups = driver.rollout(
                step, batch, group_size=args.group_size, sampling=SAMPLING
            ).result()
            with policy.offloaded() as window:
                trainer.onload()
                metrics = trainer.step(groups)
                if args.merge:
                    weights = merged(trainer.base, trainer.adapter(), trainer.adapter_config)
                    window.push(dict(weights), is_base=True)
                else:
                    window.push(trainer.adapter(), adapter=trainer.adapter_config)
                trainer.offload()
            accuracy = evaluate(step)
            report = window.report
            push_phase = "update_weights" if args.merge else "stage_adapter"
            print(
                f"step {step:2d}  reward {metrics['reward']:.3f}  accuracy {accuracy:6.1%}  "
                f"logprob gap {metrics['logprob_gap']:.1e}  version {report.weight_version}  "
                f"freed {report.freed_bytes / 2**20:.0f} MiB  "
                f"push {report.phase_s[push_phase]:.3f} s"
            )
    print(f"accuracy {before:.1%} -> {accuracy:.1%}")


def main() -> None:
    parser = make_parser(__doc__, "runs/lora_grpo", num_steps=6)
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapter")
    parser.add_argument("--merge", action="store_true", help="push base and adapter merged")
    parser.add_argument("--backend", default="local", choices=["ray", "local"])
    args = read_options(parser)
    prepare_model(args)
    train(args)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: engines and router are stopped")
    except rollout.RolloutError as error:
        sys.exit(f"lora_grpo: {error}")
