"""Cost of the store for a push: the same push to the same engines, with the store on and off.

Two servers with one embedded engine each get pushes in turns.  The store copies a push after the
gate has opened, so the benchmark waits for the copy between two pushes, as a training step would.
``push_s`` is the time the trainer waits, ``keep_s`` the time of the copy in the background.

The engine that starts first is a tenth slower on this kind of host, with and without a store.  So
everything is measured twice, and each server starts first once.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollout import RolloutConfig, launch

# Two engines, a trainer and a store must fit into memory together.
_MOST_BYTES = 600 << 20


def measure(num_bytes: int, repeats: int) -> dict[str, Any]:
    """Means, over both orders, of medians of seconds with the store on and off."""
    import torch

    torch.set_num_threads(1)
    stores = {"store_on": {"spare_bytes": 0}, "store_off": None}
    orders = [stores, dict(reversed(stores.items()))][:repeats]
    rounds = [_round(order, num_bytes, repeats) for order in orders]
    push_s = {
        name: statistics.mean(figures["push_s"][name] for figures in rounds) for name in stores
    }
    return {
        "model_bytes": rounds[0]["model_bytes"],
        "push_s": push_s,
        "keep_s": statistics.mean(figures["keep_s"] for figures in rounds),
        "on_to_off": push_s["store_on"] / push_s["store_off"],
    }


def _round(stores: Mapping[str, Any], num_bytes: int, repeats: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    from rollout.testing.tiny_model import make_tiny_model

    layers = max(1, min(num_bytes, _MOST_BYTES) // (36 << 20))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_tiny_model(folder / "model", hidden_size=1024, num_layers=layers)
        weights = load_file(model / "model.safetensors")
        servers = {
            name: stack.enter_context(launch(_config(model, folder / name, store)))["policy"]
            for name, store in stores.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in servers}
        keep_s = []
        for turn in range(repeats + 2):  # the first two take new memory
            for name, server in sorted(servers.items(), reverse=bool(turn % 2)):
                began = time.perf_counter()
                server.push(weights).result(600)
                seconds[name].append(time.perf_counter() - began)
                if name == "store_on":
                    keep_s.append(_store_s(server))
    return {
        "model_bytes": sum(tensor.nbytes for tensor in weights.values()),
        "push_s": {name: statistics.median(values[2:]) for name, values in seconds.items()},
        "keep_s": statistics.median(keep_s[2:]),
    }


def _config(model: Path, folder: Path, store: Any) -> RolloutConfig:
    policy = {
        "model_path": str(model),
        "groups": {"main": {"engine": {"kind": "embedded", "cpus": 0.5}}},
        "weights": {"store": store},
    }
    return RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": policy}})


def _store_s(server: Any) -> float:
    """Wait until the push is in the store; return the seconds of the copy."""
    while (status := server.status().result(60)).store.version != server.weight_version:
        assert status.store.is_on, status.store.reason
        time.sleep(0.01)
    return float(status.store.write_s)
