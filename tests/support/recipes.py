"""The recipes of ``examples/recipes`` and their memory sums, as the page shows them.

``python -m tests.support.recipes`` prints the tables of ``docs/how-to/recipes.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from rollout.cli.lib.gpu_sums import planned_gpu
from rollout.cli.plan import summary
from rollout.config import RolloutConfig
from rollout.rules.gpu_memory import EngineSums, ModelParts, TrainerSums, free_bytes
from rollout.weights.format.checkpoint_config import parts_of, read_checkpoint_config

RECIPES = Path(__file__).parents[2] / "examples/recipes"
CONFIGS = Path(__file__).parent / "hub_configs"
GPU_GIB = 79.1
"""What CUDA reports of an H100 with 80 GB."""
GPUS_OF_HOST = 8


@dataclass(frozen=True, slots=True)
class Megatron:
    """Parallel sizes of a trainer with Megatron and its distributed optimizer."""

    tensor: int
    expert: int = 1


MEGATRON = {
    "Qwen3-8B": {8: Megatron(4), 16: Megatron(4)},
    "Qwen3-30B-A3B": {8: Megatron(4, 8), 16: Megatron(4, 8)},
}
"""Model -> GPUs of the trainer -> sizes."""


def recipe_files() -> list[Path]:
    return sorted(RECIPES.glob("*.yaml"), key=lambda path: ("30b" in path.name, path.name))


def model_of(path: Path) -> str:
    """The name of a recipe's model on the hub, without its owner."""
    values = yaml.safe_load(path.read_text())
    return Path(values["servers"]["policy"]["model_path"]).name


def config_of(path: Path) -> RolloutConfig:
    """A recipe with the ``config.json`` of its model in the place of a checkpoint."""
    values = yaml.safe_load(path.read_text())
    values["servers"]["policy"]["model_path"] = str(CONFIGS / model_of(path))
    return RolloutConfig.from_dict(values)


def planned(path: Path) -> dict[str, Any]:
    """What ``rollout plan --gpu-gib 79.1`` shows of a recipe."""
    return summary(config_of(path), planned_gpu(GPU_GIB))


def parts(model: str) -> ModelParts:
    found = parts_of(read_checkpoint_config(CONFIGS / model))
    assert found is not None
    return found


def megatron_sums(model: ModelParts, sizes: Megatron, num_gpus: int) -> TrainerSums:
    """A trainer with bfloat16 parameters, float32 gradients and the distributed optimizer.

    6 + 12 / d bytes a parameter, where d ranks have the same parameters:
    https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html
    Buffers of gradients stay between steps.  Experts are not divided further by tensors.
    """
    experts = model.num_layers * model.experts
    others = model.num_elements - experts
    taken = (
        others / sizes.tensor * (6 + 12 * sizes.tensor / num_gpus),
        experts / sizes.expert * (6 + 12 * sizes.expert / num_gpus),
    )
    return TrainerSums(ceil(sum(taken)), ceil(sum(taken)))


def trainers(path: Path) -> Iterator[tuple[str, TrainerSums]]:
    """The name and the sums of each trainer that a recipe is for."""
    plan, model = planned(path), model_of(path)
    gpu = plan["groups"][0]["gpu"]
    num_gpus = gpu["trainer_gpus"]
    yield "FSDP2", TrainerSums(**gpu["trainer"])
    sizes = MEGATRON[model][num_gpus]
    name = f"Megatron, TP {sizes.tensor}" + (f", EP {sizes.expert}" if sizes.expert > 1 else "")
    yield name, megatron_sums(parts(model), sizes, num_gpus)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.1f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def engine_table() -> str:
    """Engines of each recipe, in GiB on each GPU."""
    heads = ("recipe", "engines x GPUs", "share", "weights", "KV cache", "KV tokens of an engine")
    rows = [_row(*heads), "|---" * 2 + "|---:" * 4 + "|"]
    for path in recipe_files():
        group = planned(path)["groups"][0]
        engine = EngineSums(**group["gpu"]["engine"])
        rows.append(
            _row(
                f"`{path.stem}`",
                f"{group['num_engines']} x {group['gpus_each']}",
                _gib(engine.static_bytes),
                _gib(engine.weights_bytes),
                _gib(engine.static_bytes - engine.weights_bytes),
                f"{engine.kv_tokens:,}".replace(",", " "),
            )
        )
    return "\n".join(rows)


def trainer_table() -> str:
    """What trainers take of each GPU, and what is free beside them, in GiB."""
    heads = (
        "recipe",
        "trainer",
        "in its step",
        "at rest",
        "free in its step",
        "free in a push",
        "free, serving",
        "free, serving, moved",
        "moved: host memory",
    )
    rows = [_row(*heads), "|---" * 2 + "|---:" * 7 + "|"]
    for path in recipe_files():
        gpu = planned(path)["groups"][0]["gpu"]
        engine = EngineSums(**gpu["engine"])
        for name, trainer in trainers(path):
            free, moved = (
                free_bytes(gpu["gpu_bytes"], engine, sums, gpu["push_bytes"])
                for sums in (trainer, TrainerSums())
            )
            taken = (trainer.step_bytes, trainer.rest_bytes, free.training, free.pushing)
            more = (free.serving, moved.serving, trainer.rest_bytes * GPUS_OF_HOST)
            rows.append(_row(f"`{path.stem}`", name, *map(_gib, (*taken, *more))))
    return "\n".join(rows)


if __name__ == "__main__":
    print(engine_table(), trainer_table(), sep="\n\n")
