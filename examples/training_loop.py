"""The library in your training loop: three ways to share the memory with the engines.

Each way releases the memory of the engines, trains, pushes the new weights, and lets the engines
serve again.  The router holds requests that come in between.

    python examples/training_loop.py [--backend ray]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import rollout
import torch
from rollout.testing import make_tiny_model
from transformers import AutoModelForCausalLM


def train(model: torch.nn.Module) -> None:
    """A stand-in for a real step: change every weight a little."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.999)


def step_with_a_window(policy: rollout.ServerHandle, model: torch.nn.Module) -> None:
    """The shortest way.  If the block raises, the engines stay offloaded and the gate closed."""
    with policy.offloaded() as window:
        train(model)
        window.push(model.state_dict())


async def step_with_an_async_window(policy: rollout.ServerHandle, model: torch.nn.Module) -> None:
    """The same, without blocking the event loop."""
    async with policy.offloaded() as window:
        await asyncio.to_thread(train, model)
        window.push(model.state_dict())


def step_with_verbs(policy: rollout.ServerHandle, model: torch.nn.Module) -> None:
    """Each phase by itself.  A method returns at once; ``result()`` or ``await`` waits for it."""
    policy.phases.pause_generation().result()
    policy.phases.flush_cache().result()
    policy.phases.release_memory_occupation().result()
    train(model)
    policy.phases.onload_weights().result()
    policy.phases.update_weights(model.state_dict()).result()
    policy.phases.verify().result()
    policy.phases.onload_kv().result()
    policy.phases.continue_generation().result()


def config(model_path: Path) -> rollout.RolloutConfig:
    groups = {
        "main": {
            "num_engines": 1,
            "engine": {"kind": "embedded", "options": {"max-total-tokens": 4096}},
        }
    }
    server = {"model_path": str(model_path), "groups": groups}
    return rollout.RolloutConfig.from_dict({"run_id": "loop", "servers": {"policy": server}})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="local", choices=["local", "ray"])
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model_path = make_tiny_model(Path(folder) / "model")
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype="float32")
        with rollout.launch(config(model_path), backend=args.backend) as deployment:
            policy = deployment["policy"]
            step_with_a_window(policy, model)
            asyncio.run(step_with_an_async_window(policy, model))
            step_with_verbs(policy, model)
            status = policy.status().result()
            print(f"{status.phase} at {status.router_url}, weight version {status.weight_version}")


if __name__ == "__main__":
    main()
