"""What the store costs a push: the same push to the same engines, with the store on and off.

Two servers of one embedded engine each, pushed to in turns.  The store keeps a push after the gate
is open again, so between two pushes it is waited for, as a training step would: ``push_s`` is what
the trainer waits for, and ``keep_s`` how long the copy then takes in the background.

The engine that is started first is slower by a tenth here, whatever its store, for its memory lies
elsewhere; so all is done twice, each server first once.
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

# Two engines, a trainer and a store are to fit beside each other.
_MOST_BYTES = 600 << 20


def measure(num_bytes: int, repeats: int) -> dict[str, Any]:
    """Means, over both orders, of medians of seconds with the store on and off."""
    import torch

    torch.set_num_threads(1)
    stores = {"store_on": {"spare_bytes": 0}, "store_off": None}
    orders = stores, dict(reversed(stores.items()))
    rounds = [_round(order, num_bytes, repeats) for order in orders]
    push_s = {name: statistics.mean(one["push_s"][name] for one in rounds) for name in stores}
    return {
        "model_bytes": rounds[0]["model_bytes"],
        "push_s": push_s,
        "keep_s": statistics.mean(one["keep_s"] for one in rounds),
        "on_to_off": push_s["store_on"] / push_s["store_off"],
    }


def _round(stores: Mapping[str, Any], num_bytes: int, repeats: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    from engines.embedded.tiny import make_tiny_model

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
                server.sync_weights(weights).result(600)
                seconds[name].append(time.perf_counter() - began)
                if name == "store_on":
                    keep_s.append(_kept(server))
    return {
        "model_bytes": sum(tensor.nbytes for tensor in weights.values()),
        "push_s": {name: statistics.median(values[2:]) for name, values in seconds.items()},
        "keep_s": statistics.median(keep_s[2:]),
    }


def _config(model: Path, folder: Path, store: Any) -> RolloutConfig:
    policy = {
        "model_path": str(model),
        "groups": {"main": {"engine": {"cpus": 0.5}}},
        "weights": {"store": store},
    }
    return RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": policy}})


def _kept(server: Any) -> float:
    """Wait until the push is kept; how long that took."""
    while (status := server.status().result(60)).store.version != server.weight_version:
        assert status.store.is_on, status.store.because
        time.sleep(0.01)
    return float(status.store.write_s)
