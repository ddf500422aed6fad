"""Pushes by one process through a server: the seconds of a push, and those with the gate shut.

``dense`` and ``moe`` (every expert is a tensor of its own) to one embedded engine. ``copied``: all
tensors are copied before the server is called; ``streamed``: while the engine loads. ``paused_s``
is the time from pause to continue, ``seconds`` the whole call; both are medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Rows
from benchmarks.weights.clock import Row
from rollout import RolloutConfig, ServerHandle, launch

# An engine, the trainer's tensors and their copies must fit into memory together.
_MOST_BYTES = 512 << 20
_NUM_EXPERTS = 128


def measure(num_bytes: int, repeats: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    return {shape: _measure(shape, num_bytes, repeats) for shape in ("dense", "moe")}


def _measure(shape: str, num_bytes: int, repeats: int) -> Rows:
    from safetensors.torch import load_file

    rows = Rows(f"gate.{shape}")
    with tempfile.TemporaryDirectory() as folder:
        model = _model(Path(folder), shape, min(num_bytes, _MOST_BYTES))
        weights = {
            name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()
        }
        rows["tensors"] = len(weights)
        rows["bytes"] = sum(tensor.nbytes for tensor in weights.values())
        for name, streams in (("copied", False), ("streamed", True)):
            with launch(_config(model, Path(folder) / name, streams=streams)) as deployment:
                rows[name] = _row(deployment["policy"], weights, repeats)
    return rows


def _row(policy: ServerHandle, weights: dict[str, Any], repeats: int) -> Row:
    seconds, paused = [], []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        report = policy.push(weights).result(600)
        seconds.append(time.perf_counter() - began)
        paused.append(sum(report.phase_s.values()))
    # The first push takes new memory.
    return {
        "seconds": statistics.median(seconds[1:]),
        "paused_s": statistics.median(paused[1:]),
        "first_seconds": seconds[0],
    }


def _model(folder: Path, shape: str, num_bytes: int) -> Path:
    from rollout.testing.tiny_model import make_tiny_model

    is_small = num_bytes < 64 << 20
    more: dict[str, Any] = {"architecture": "qwen3"}
    hidden_size = 128 if is_small else 1024
    layer_bytes = 9 * hidden_size**2 * 4
    if shape == "moe":
        num_experts = 8 if is_small else _NUM_EXPERTS
        hidden_size, layer_bytes = 256, num_experts * 3 * (128 << 10)
        more = {"architecture": "qwen3_moe", "num_experts": num_experts}
    layers = max(1, num_bytes // layer_bytes)
    return make_tiny_model(folder / "model", hidden_size=hidden_size, num_layers=layers, **more)


def _config(model: Path, folder: Path, *, streams: bool) -> RolloutConfig:
    policy = {
        "model_path": str(model),
        "groups": {"main": {"engine": {"kind": "embedded", "cpus": 0.5}}},
        "weights": {"stream": streams},
    }
    return RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": policy}})
