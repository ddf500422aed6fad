"""Pushes by each transport to one engine on this host, and fingerprints.

A push is counted from the trainer's tensors to the engine's own memory with the version set, as
``ServerHandle`` does it: manifest, fingerprints, buckets, calls over HTTP.  The engine is a
process that holds the tensors and takes them with the embedded engine's code (``receiver``).
``copied``: all is copied before anything is sent; ``streamed``: engines take a bucket while the
next is made.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.weights.clock import Row, memcpy, rate
from engines.client import EngineClient
from engines.embedded.command import MEMORY
from engines.protocol import Endpoint
from rollout.config import Transport, WeightsConfig
from rollout.weights.manifest import TensorSpec
from rollout.weights.push import PushTarget, push_weights
from rollout.weights.slots import SlotPool
from rollout.weights.tensors import (
    KeptGroup,
    Plans,
    Sender,
    Weights,
    bytes_fingerprint,
    device_fingerprint,
)

WAYS = {
    "shared_memory_copied": (Transport.SHARED_MEMORY, False),
    "shared_memory_streamed": (Transport.SHARED_MEMORY, True),
    "tensor_copied": (Transport.TENSOR, False),
    "tensor_streamed": (Transport.TENSOR, True),
    "distributed_gloo": (Transport.DISTRIBUTED, True),
    "disk": (Transport.DISK, False),
}
VERSIONS = itertools.count(1)


def specs_of(shape: str, num_bytes: int) -> list[TensorSpec]:
    """About ``num_bytes`` of bfloat16: a dense model's layers, or layers of 128 experts."""
    hidden = 2048 if shape == "dense" else 1024
    wide = 3 * hidden if shape == "dense" else 64
    found: list[TensorSpec] = []
    for layer in itertools.count():
        at = f"model.layers.{layer}"
        mlps = ["mlp"] if shape == "dense" else [f"mlp.experts.{one}" for one in range(128)]
        found += [
            TensorSpec(f"{at}.self_attn.{part}_proj.weight", "bfloat16", (hidden, hidden))
            for part in "qkvo"
        ]
        for mlp in mlps:
            found += [
                TensorSpec(f"{at}.{mlp}.gate_proj.weight", "bfloat16", (wide, hidden)),
                TensorSpec(f"{at}.{mlp}.up_proj.weight", "bfloat16", (wide, hidden)),
                TensorSpec(f"{at}.{mlp}.down_proj.weight", "bfloat16", (hidden, wide)),
            ]
        found.append(TensorSpec(f"{at}.input_layernorm.weight", "bfloat16", (hidden,)))
        if sum(2 * torch.Size(one.shape).numel() for one in found) >= num_bytes:
            return found
    raise AssertionError("unreachable")


@contextmanager
def receiver(specs: list[TensorSpec], folder: Path) -> Iterator[tuple[int, int]]:
    """Pid and port of an engine with these tensors."""
    path = folder / "manifest.json"
    path.write_text(
        json.dumps([{"name": s.name, "dtype": s.dtype, "shape": s.shape} for s in specs])
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.weights.receiver", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=MEMORY | os.environ,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


class Pushing:
    """Pushes the same tensors again and again, as versions that go up."""

    def __init__(self, tensors: dict[str, torch.Tensor], port: int, folder: Path) -> None:
        self._tensors = tensors
        self._folder = folder
        # These live as long as a server does, not for one push.
        self._pool = SlotPool()
        self._plans = Plans()
        self._kept = KeptGroup()
        self._held: dict[str, str] = {}
        self._runner = asyncio.Runner()
        self._engine = EngineClient(Endpoint("127.0.0.1", port))

    def push(self, transport: Transport, *, stream: bool, fingerprint: bool = True) -> None:
        settings = WeightsConfig(
            transport=transport,
            stream=stream,
            fingerprint=fingerprint,
            disk_path=str(self._folder / "{version}"),
        )
        weights = Weights(self._tensors, bucket_bytes=settings.bucket_bytes, plans=self._plans)
        folder = str(self._folder)
        sender = Sender(settings, self._pool, timeout_s=120, model_path=folder, kept=self._kept)
        outgoing = sender.send(weights, next(VERSIONS), transport, may_stream=stream)
        try:
            self._runner.run(self._carry(outgoing.push))
        finally:
            outgoing.close()

    async def _carry(self, push: Any) -> None:
        target = PushTarget(self._engine, process="one", takes_flat=True)
        answers = await push_weights(push, {"engine": target}, budget_s=300, held=self._held)
        if answers["engine"].failure is not None:
            raise answers["engine"].failure

    def check(self) -> None:
        """The engine holds what was pushed last."""
        report = self._runner.run(self._engine.weights_checker())
        mine = {name: bytes_fingerprint(name, one) for name, one in self._tensors.items()}
        assert report.tensors[0] == mine

    def forget(self) -> None:
        """Remove checkpoints of earlier versions."""
        for folder in self._folder.glob("[0-9]*"):
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()

    def close(self) -> None:
        self._runner.run(self._engine.aclose())
        self._runner.close()
        self._kept.close()
        self._pool.close()


def measure(num_bytes: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {shape: _measure(shape, num_bytes, repeats) for shape in ("dense", "experts")}


def _measure(shape: str, num_bytes: int, repeats: int) -> dict[str, Any]:
    specs = specs_of(shape, num_bytes)
    tensors = {one.name: torch.randn(one.shape).to(torch.bfloat16) for one in specs}
    size = sum(one.nbytes for one in tensors.values())
    rows: dict[str, Any] = {"tensors": len(tensors), "bytes": size}
    with tempfile.TemporaryDirectory() as folder, receiver(specs, Path(folder)) as (pid, port):
        pushing = Pushing(tensors, port, Path(folder))
        try:
            for name, (transport, stream) in WAYS.items():
                yardstick = memcpy(min(size, 1 << 30), 3)
                # The first takes its slots' memory, which later pushes find again.
                first = _push_row(pushing, transport, stream, size, 1, pid)
                # Some take a hundred times as long: once more is enough for those.
                times = repeats if first["gib_per_s"] > 0.5 else 1
                row = _push_row(pushing, transport, stream, size, times, pid)
                row["first_gib_per_s"] = first["gib_per_s"]
                rows[name] = _compared(row, yardstick)
                pushing.check()
                pushing.forget()
        finally:
            pushing.close()
    for name, of in (("xxh3", bytes_fingerprint), ("sums", device_fingerprint)):
        yardstick = memcpy(min(size, 1 << 30), 3)
        row = rate(lambda of=of: [of(*one) for one in tensors.items()], size, repeats)  # type: ignore[misc]
        rows[f"fingerprint_{name}"] = _compared(row, yardstick)
    return rows


def _push_row(
    pushing: Pushing, transport: Transport, stream: bool, size: int, repeats: int, pid: int
) -> Row:
    return rate(lambda: pushing.push(transport, stream=stream), size, repeats, others=[pid])


def _compared(row: Row, yardstick: Row) -> Row:
    """With the share of what memcpy did just before."""
    return row | {"of_memcpy": row["gib_per_s"] / yardstick["gib_per_s"]}
