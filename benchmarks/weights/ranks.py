"""Pushes by 1, 2 and 4 ranks of a trainer (gloo) on this host, to two engines.

``replicated``: every rank has whole tensors, so only the push itself is measured.  ``sharded``: the
tensors are sharded over the ranks, and the push gathers them.  ``gather``: only these gathers,
without a push.  ``generator``: the trainer's own code gathers them one by one.  ``peer``: as slime
does, see ``rank_process``.  ``cpu_to_one_rank``: CPU of a push of whole tensors against that by one
rank; ``cpu_to_one_rank_sharded``: of a push of shards without its gathers, against the same.

A push is measured through a server, from the command to the report on every rank.  So it includes
pause, verification and continue; the peer's engines only load.  CPU is of ranks, engines, server.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import Rows
from benchmarks.weights.clock import rate
from rollout import RolloutConfig, launch
from rollout.config.run_dir import RunFolder

NUMS_OF_RANKS = (1, 2, 4)
# Two engines, and four ranks with the tensors whole and in shards, must fit into memory together.
_MOST_BYTES = 512 << 20
# Less than this is the size of ``--smoke``, of one shape and with one engine: 4 ranks take half a
# minute to start.
_SMALL_BYTES = 64 << 20
_NUM_BUCKETS = 16


def measure(num_bytes: int, repeats: int) -> dict[str, Any]:
    shapes = ("experts",) if num_bytes < _SMALL_BYTES else ("dense", "experts")
    return {shape: _measure(shape, num_bytes, repeats) for shape in shapes}


def _measure(shape: str, num_bytes: int, repeats: int) -> dict[str, Any]:
    from safetensors import safe_open

    with tempfile.TemporaryDirectory() as folder:
        is_smoke = num_bytes < _SMALL_BYTES
        nums_of_ranks = NUMS_OF_RANKS[1:2] if is_smoke else NUMS_OF_RANKS
        model = _model(Path(folder), shape, min(num_bytes, _MOST_BYTES))
        with safe_open(model / "model.safetensors", "pt") as file:
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
        bucket_bytes = max(1 << 16, sum(sizes) // _NUM_BUCKETS)
        figures = Rows(f"ranks.{shape}")
        figures["tensors"], figures["bytes"] = len(sizes), sum(sizes)
        figures["bucket_bytes"] = bucket_bytes
        config = _config(model, Path(folder), bucket_bytes, num_engines=1 if is_smoke else 2)
        with launch(config) as deployment:
            for num_ranks in nums_of_ranks:
                with _ranks(deployment, model, num_ranks) as ranks:
                    found = ranks.measure(sum(sizes), repeats)
                figures[str(num_ranks)] = found | _to_one_rank(found, figures.get("1", found))
    return figures


def _to_one_rank(own: dict[str, Any], one: dict[str, Any]) -> dict[str, float]:
    def cpu(rows: dict[str, Any], name: str) -> float:
        return float(rows[name]["cpu_s_per_gib"])

    pushed = cpu(own, "sharded") - cpu(own, "gather")
    return {
        "cpu_to_one_rank": cpu(own, "replicated") / cpu(one, "replicated"),
        "cpu_to_one_rank_sharded": pushed / (cpu(one, "sharded") - cpu(one, "gather")),
    }


def _model(folder: Path, shape: str, num_bytes: int) -> Path:
    """Float32, so that an expert's tensor of 256 times 128 has 128 KiB."""
    from rollout.testing.tiny_model import make_tiny_model

    is_small = num_bytes < _SMALL_BYTES
    if shape == "dense":
        hidden_size = 128 if is_small else 1024
        layer_bytes = 9 * hidden_size**2 * 4
        more: dict[str, Any] = {"architecture": "qwen3"}
    else:
        hidden_size, num_experts = 256, 8 if is_small else 128
        layer_bytes = num_experts * 3 * (128 << 10)
        more = {"architecture": "qwen3_moe", "num_experts": num_experts}
    return make_tiny_model(
        folder / "model",
        hidden_size=hidden_size,
        num_layers=max(1, num_bytes // layer_bytes),
        **more,
    )


def _config(model: Path, folder: Path, bucket_bytes: int, num_engines: int) -> RolloutConfig:
    policy = {
        "model_path": str(model),
        "groups": {
            "main": {"num_engines": num_engines, "engine": {"kind": "embedded", "cpus": 0.5}}
        },
        "weights": {"bucket_bytes": bucket_bytes},
    }
    return RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": policy}})


class _Ranks:
    """The processes of a trainer, and the engines that they push to."""

    def __init__(self, processes: list[subprocess.Popen[str]], engines: Any) -> None:
        self._processes = processes
        self._pids = [process.pid for process in processes] + [engine.pid for engine in engines]

    def measure(self, num_bytes: int, repeats: int) -> dict[str, Any]:
        rows = {
            name: self._row(name, num_bytes, repeats)
            for name in ("replicated", "sharded", "generator", "peer")
        }
        rows["gather"] = self._timed("gather", num_bytes, repeats)
        memory = self.do("memory")
        return rows | {
            name: max(figures[name] for figures in memory)
            for name in ("beyond_model_buckets", "peak_rss_mib")
        }

    def _row(self, name: str, num_bytes: int, repeats: int) -> dict[str, Any]:
        replies = self.do(name)  # the first push takes new memory
        sent = {str(rank): one["sent"] for rank, one in enumerate(replies)}
        return self._timed(name, num_bytes, repeats) | {
            "sent_bytes": sent,
            "largest_share": max(sent.values()) / num_bytes,
        }

    def _timed(self, name: str, num_bytes: int, repeats: int) -> dict[str, Any]:
        row = rate(lambda: self.do(name), num_bytes, repeats, others=self._pids)
        return {
            "seconds": num_bytes / 2**30 / row["gib_per_s"],
            "cpu_s_per_gib": row["cpu_s_per_gib"],
        }

    def do(self, command: str) -> list[dict[str, Any]]:
        """Every rank's answer to a command."""
        line = json.dumps({"do": command}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return self.read()

    def read(self) -> list[dict[str, Any]]:
        replies = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"rank {rank} has ended; its error is above")
            replies.append(json.loads(line))
        return replies


@contextmanager
def _ranks(deployment: Any, model: Path, num_ranks: int) -> Iterator[_Ranks]:
    run = RunFolder.of(deployment.config).path
    status = deployment["policy"].status().result(60)
    arguments = [run, model, run / f"meet-{num_ranks}"]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.weights.rank_process"),
                *map(str, (*arguments, rank, num_ranks)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        ranks = _Ranks(processes, status.groups[0].engines)
        ranks.read()
        yield ranks
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
