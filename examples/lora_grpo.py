"""GRPO of a LoRA adapter: only the adapter is trained and pushed.

The engines share their memory with the trainer, as in ``colocated_grpo.py``.  While they are
offloaded, their base weights are in host memory; that they come back bit-equal is verified.  A push
has only the adapter, a few per cent of the model, and requests name the adapter.

    python examples/lora_grpo.py                # about a minute on two cores
    python examples/lora_grpo.py --merge        # push base and adapter merged, as full weights
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import rollout
import torch
from rollout.weights.tensors.adapters import merged
from transformers.utils import logging as transformers_logging

from arithmetic import (
    MAX_NEW_TOKENS,
    judge,
    make_splits,
    make_warm_started_model,
    prompts,
)
from grpo import GrpoConfig, GrpoTrainer

ADAPTER = "policy"
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


def config(args: argparse.Namespace, model_path: Path) -> rollout.RolloutConfig:
    """Engines that load adapters, and release their memory in each step."""
    options = {
        "dtype": "float32",
        "max-total-tokens": 32768,
        "log-level": "warning",
        "enable-lora": True,
        "max-lora-rank": args.rank,
    }
    return rollout.RolloutConfig.from_dict(
        {
            "run_id": f"lora-grpo-{args.seed}",
            "log_dir": str(args.out / "logs"),
            "servers": {
                "policy": {
                    "model_path": str(model_path),
                    "weights": {"update": "lora", "adapter": ADAPTER},
                    "groups": {
                        "main": {
                            "num_engines": args.engines,
                            "engine": {"kind": "embedded", "cpus": 1, "options": options},
                        }
                    },
                }
            },
        }
    )


def train(args: argparse.Namespace, model_path: Path) -> None:
    """Steps of rollout, training of the adapter, and a push of the adapter alone."""
    splits = make_splits(args.seed)
    sampling = rollout.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
    greedy = rollout.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0)
    held_out = {"addition": rollout.EvalDataset(prompts(splits.held_out), greedy)}
    torch.manual_seed(args.seed)
    trainer = LoraTrainer(model_path, args.rank, GrpoConfig(learning_rate=2e-3), args.seed)
    adapter_bytes = sum(tensor.nbytes for tensor in trainer.adapter().values())
    base_bytes = sum(tensor.nbytes for tensor in trainer.base.values())

    with (
        rollout.launch(config(args, model_path), backend=args.backend) as deployment,
        rollout.Driver(
            deployment["policy"].url, judge, lora_path=None if args.merge else ADAPTER
        ) as driver,
    ):
        policy = deployment["policy"]
        # Returns None, and sends nothing, if the engines already have these weights.
        synced = policy.sync_base(trainer.base)
        if synced is not None:
            synced.result()
        print(f"base {base_bytes / 2**20:.1f} MiB, {'pushed' if synced else 'as on disk'}")
        if not args.merge:
            # Requests name the adapter, so the engines need one; this first one changes nothing.
            first = policy.make_adapter_push(trainer.adapter(), trainer.adapter_config)
            policy.sync_weights(first).result()
            print(f"adapter {adapter_bytes / 2**20:.2f} MiB, {adapter_bytes / base_bytes:.1%}")

        def evaluate(step: int) -> float:
            return driver.evaluate(step, held_out).result().metrics["eval/addition"]

        before = accuracy = evaluate(0)
        print(f"before training: accuracy {before:.1%} on held-out sums")
        for step in range(1, args.steps + 1):
            start = (step - 1) * args.prompts % len(splits.train)
            batch = prompts((splits.train * 2)[start : start + args.prompts])
            groups = driver.rollout(
                step, batch, group_size=args.group_size, sampling=sampling
            ).result()
            with policy.offloaded() as window:
                trainer.onload()
                metrics = trainer.step(groups)
                if args.merge:
                    weights = merged(trainer.base, trainer.adapter(), trainer.adapter_config)
                    window.push_base(dict(weights))
                else:
                    window.push_adapter(trainer.adapter(), trainer.adapter_config)
                trainer.offload()
            accuracy = evaluate(step)
            report = window.report
            print(
                f"step {step:2d}  reward {metrics['reward']:.3f}  accuracy {accuracy:6.1%}  "
                f"logprob gap {metrics['logprob_gap']:.1e}  version {report.weight_version}  "
                f"freed {report.freed_bytes / 2**20:.0f} MiB  "
                f"push {report.phase_s['update_weights']:.3f} s"
            )
    print(f"accuracy {before:.1%} -> {accuracy:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6, help="training steps")
    parser.add_argument("--prompts", type=int, default=32, help="prompts in a step")
    parser.add_argument("--group-size", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapter")
    parser.add_argument("--engines", type=int, default=2, help="engines behind the router")
    parser.add_argument("--merge", action="store_true", help="push base and adapter merged")
    parser.add_argument("--backend", default="local", choices=["ray", "local"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="start from this model directory")
    parser.add_argument("--out", type=Path, default=Path("runs/lora_grpo"))
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    model_path = args.model or args.out / f"model-{args.seed}"
    if args.model is None:
        started = time.monotonic()
        make_warm_started_model(model_path, args.seed)
        print(f"warm start took {time.monotonic() - started:.1f} s")
    train(args, model_path)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: engines and router are stopped")
    except rollout.RolloutError as error:
        sys.exit(f"lora_grpo: {error}")
