"""One rank of TRL's ``GRPOTrainer`` with FSDP2 or DDP, for ``test_trl``; rank 0 writes its log.

The prompts are single tokens.  The reward prefers small ids, so that the weights change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import rollout
from rollout.adapters.trl import RolloutFunction, WeightTransfer


# What accelerate does with FSDP on GPUs; on CPUs it ignores the setting.
def shard_on_cpus() -> None:
    before = AcceleratorState.__init__

    def with_fsdp(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        before(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if self.distributed_type is DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = self.distributed_type
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = with_fsdp  # type: ignore[method-assign]


FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "cpu_ram_efficient_loading": False}}


def small_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [-sum(ids) / len(ids) / 100 for ids in completion_ids]


def transfer(policy: rollout.ServerHandle, trainer: GRPOTrainer) -> None:
    """As ``AsyncGRPOTrainer`` sends weights: all ranks gather, and the main process alone sends."""

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
            yield name, one.full_tensor() if isinstance(one, DTensor) else one.detach()

    if not trainer.accelerator.is_main_process:
        for _ in gathered():
            pass
        return
    way = WeightTransfer(policy)
    way.init_weight_transfer()
    way.pause()
    way.send_weights(gathered())
    way.resume()
    way.destroy()


def main(run: str, model: str, out: str, kind: str) -> None:
    torch.set_num_threads(1)
    if kind == "fsdp":
        shard_on_cpus()
    settings = GRPOConfig(
        output_dir=f"{out}/trl",
        max_steps=3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        learning_rate=1e-3,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": "float32"},
        **(FSDP if kind == "fsdp" else {}),
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    dataset = Dataset.from_list([{"prompt": tokenizer.decode([20 + one])} for one in range(16)])
    policy = rollout.connect(run)["policy"]
    with RolloutFunction(policy) as rollout_func:
        trainer = GRPOTrainer(
            model, small_ids, settings, dataset, tokenizer, rollout_func=rollout_func
        )
        trainer.train()
    if kind == "fsdp":
        transfer(policy, trainer)
    if trainer.accelerator.is_main_process:
        sharded = [type(one).__name__ for one in trainer.model.parameters()]
        log = {"steps": trainer.state.log_history, "parameters": sorted(set(sharded))}
        Path(out, "log.json").write_text(json.dumps(log))


if __name__ == "__main__":
    main(*sys.argv[1:])
