"""Pushes by each transport to one engine on this host, and fingerprints.

A push is measured from the trainer's tensors until the engine has them in its own memory under the
new version, with all steps of ``ServerHandle``: manifest, fingerprints, buckets, calls over HTTP.
The engine is a process that loads tensors with the embedded engine's code (``receiver``).
``copied``: all buckets are filled before the first is sent; ``streamed``: engines load a bucket
while the next is filled.  ``unchecked``: values are not checked (``weights.allow_nonfinite``).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Rows
from benchmarks.weights.clock import Row, memcpy, rate
from engines.embedded.command import MEMORY
from engines.http.client import EngineClient
from engines.protocol import Endpoint
from engines.tensors.fingerprint import BYTES
from engines.tensors.torch_fingerprint import bytes_fingerprint, device_fingerprints
from rollout.config import Transport
from rollout.weights.format.manifest import TensorSpec
from rollout.weights.push.push import PushRequest
from rollout.weights.push.weight_push import push_weights
from rollout.weights.ranks.leader import push_of_one_rank
from rollout.weights.ranks.trainer_rank import TrainerRank
from rollout.weights.routes.route import PushTarget
from tests.support.still_server import StillServer, server_config

ROWS = {
    "shared_memory_copied": (Transport.SHARED_MEMORY, False, True),
    "shared_memory_copied_unchecked": (Transport.SHARED_MEMORY, False, False),
    "shared_memory_streamed": (Transport.SHARED_MEMORY, True, True),
    "shared_memory_streamed_unchecked": (Transport.SHARED_MEMORY, True, False),
    "by_value_copied": (Transport.BY_VALUE, False, True),
    "by_value_streamed": (Transport.BY_VALUE, True, True),
    "distributed_gloo": (Transport.DISTRIBUTED, True, True),
    "disk": (Transport.DISK, False, True),
}
"""The route of each row, whether it is streamed, and whether values are checked."""
VERSIONS = itertools.count(1)


def specs_of(shape: str, num_bytes: int) -> list[TensorSpec]:
    """About ``num_bytes`` of bfloat16: layers of a dense model, or layers of 128 experts."""
    hidden = 2048 if shape == "dense" else 1024
    if num_bytes < 64 << 20:
        hidden //= 8
    wide = 3 * hidden if shape == "dense" else 64
    specs: list[TensorSpec] = []
    for layer in itertools.count():
        at = f"model.layers.{layer}"
        mlps = ["mlp"] if shape == "dense" else [f"mlp.experts.{expert}" for expert in range(128)]
        specs += [
            TensorSpec(f"{at}.self_attn.{part}_proj.weight", "bfloat16", (hidden, hidden))
            for part in "qkvo"
        ]
        for mlp in mlps:
            specs += [
                TensorSpec(f"{at}.{mlp}.gate_proj.weight", "bfloat16", (wide, hidden)),
                TensorSpec(f"{at}.{mlp}.up_proj.weight", "bfloat16", (wide, hidden)),
                TensorSpec(f"{at}.{mlp}.down_proj.weight", "bfloat16", (hidden, wide)),
            ]
        specs.append(TensorSpec(f"{at}.input_layernorm.weight", "bfloat16", (hidden,)))
        if sum(2 * torch.Size(spec.shape).numel() for spec in specs) >= num_bytes:
            return specs
    raise AssertionError("unreachable")


@contextmanager
def receiver(
    specs: list[TensorSpec], folder: Path, host: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[tuple[int, int]]:
    """Pid and port of an engine that holds these tensors.

    Args:
        prefix: of its command.
    """
    path = folder / "manifest.json"
    path.write_text(
        json.dumps([{"name": s.name, "dtype": s.dtype, "shape": s.shape} for s in specs])
    )
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "benchmarks.weights.receiver", str(path), host],
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
    """Pushes the same tensors repeatedly, each time under a new version."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        port: int,
        folder: Path,
        host: str = "127.0.0.1",
    ) -> None:
        self._tensors = tensors
        self._port = port
        self._folder = folder
        self._rank = TrainerRank(server_config(folder))
        self._groups: dict[str, str] = {}
        self._runner = asyncio.Runner()
        self._engine = EngineClient(Endpoint(host, port))
        self._version: int | None = None

    def push(
        self,
        transport: Transport,
        *,
        stream: bool,
        fingerprint: bool = True,
        checks_values: bool = True,
    ) -> None:
        self._rank.config = server_config(
            self._folder,
            transport=transport,
            stream=stream,
            allow_nonfinite=not checks_values,
            disk_path=str(self._folder / "{version}"),
        )
        server = StillServer(fingerprints=BYTES if fingerprint else "")
        version = next(VERSIONS)
        with push_of_one_rank(
            self._rank, server, PushRequest(self._tensors, version), may_stream=stream
        ) as made:
            self._runner.run(self._send(made.weights))

    async def _send(self, push: Any) -> None:
        target = PushTarget(
            self._engine, process="receiver", is_compared=True, weight_version=self._version
        )
        replies = await push_weights(push, {"engine": target}, budget_s=300, groups=self._groups)
        if replies["engine"].failure is not None:
            raise replies["engine"].failure

    def check(self) -> None:
        """Assert that the engine holds the tensors of the last push."""
        report = self._runner.run(self._engine.weights_checker())
        expected = {name: bytes_fingerprint(name, tensor) for name, tensor in self._tensors.items()}
        assert report.tensors[0] == expected

    def remove_checkpoints(self) -> None:
        """Remove checkpoints of earlier versions."""
        for folder in self._folder.glob("[0-9]*"):
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()

    def close(self) -> None:
        self._runner.run(self._engine.aclose())
        self._runner.close()
        self._rank.close()


def measure(num_bytes: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {shape: _measure(shape, num_bytes, repeats) for shape in ("dense", "experts")}


def _measure(shape: str, num_bytes: int, repeats: int) -> dict[str, Any]:
    specs = specs_of(shape, num_bytes)
    tensors = {spec.name: torch.randn(spec.shape).to(torch.bfloat16) for spec in specs}
    size = sum(tensor.nbytes for tensor in tensors.values())
    rows = Rows(f"push.{shape}")
    rows["tensors"], rows["bytes"] = len(tensors), size
    with tempfile.TemporaryDirectory() as folder, receiver(specs, Path(folder)) as (pid, port):
        pushing = Pushing(tensors, port, Path(folder))
        try:
            for name, (transport, stream, checks) in ROWS.items():
                yardstick = memcpy(min(size, 1 << 30), 3)
                # The first push allocates the memory of its slots, which later pushes reuse.
                push = partial(pushing.push, transport, stream=stream, checks_values=checks)
                first = rate(push, size, 1, others=[pid])
                # Some transports are a hundred times slower: repeat those once.
                times = repeats if first["gib_per_s"] > 0.5 else 1
                row = rate(push, size, times, others=[pid])
                row["first_gib_per_s"] = first["gib_per_s"]
                rows[name] = _compared(row, yardstick)
                pushing.check()
                pushing.remove_checkpoints()
        finally:
            pushing.close()
    for name, hash_all in (
        ("xxh3", lambda: [bytes_fingerprint(*item) for item in tensors.items()]),
        ("sums", lambda: device_fingerprints(tensors.items())),
    ):
        yardstick = memcpy(min(size, 1 << 30), 3)
        rows[f"fingerprint_{name}"] = _compared(rate(hash_all, size, repeats), yardstick)
    return rows


def _compared(row: Row, yardstick: Row) -> Row:
    """The row with its share of the speed of memcpy, measured just before."""
    return row | {"of_memcpy": row["gib_per_s"] / yardstick["gib_per_s"]}
