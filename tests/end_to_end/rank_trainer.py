"""One rank of a trainer, for ``test_rank_push``: does what its standard input says, one line each.

It prints one line of JSON for each command.  Every rank has the same tensors, drawn from a seed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rollout
from rollout.config import Transport
from rollout.runtime.handle.pusher import Pusher
from rollout.weights.format.manifest import read_checkpoint_manifest

TIED = "lm_head.weight"


class Trainer:
    def __init__(self, run: str, model_path: str) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (self.num_ranks,))
        manifest = read_checkpoint_manifest(model_path)
        assert manifest is not None
        self.manifest = manifest
        self.pusher: Pusher = rollout.connect(run)["policy"].pusher(rank_timeout_s=4)

    def whole(self, seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        tensors = {
            name: torch.randn(spec.shape).to(getattr(torch, spec.dtype))
            for name, spec in self.manifest.tensors.items()
        }
        return tensors

    def sharded(self, seed: int, prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {
            prefix + name: distribute_tensor(tensor, self.mesh, [Shard(0)])
            for name, tensor in self.whole(seed).items()
        }
        embedding = f"{prefix}model.embed_tokens.weight"
        if TIED not in self.manifest.tensors and embedding in found:
            found[prefix + TIED] = found[embedding].detach()
        return found

    # -- commands ---------------------------------------------------------------------------

    def push(self, seed: int, **more: Any) -> Any:
        return self.pusher.push(self.sharded(seed), **more)

    def push_by(self, transport: str, seed: int, is_streamed: bool = False) -> Any:
        config = self.pusher.config
        weights = config.weights.model_copy(update={"transport": Transport(transport)})
        self.pusher.config = config.model_copy(update={"weights": weights})
        return self.streamed(seed) if is_streamed else self.push(seed)

    def push_wide(self, seed: int) -> Any:
        """Tensors of float64, which no engine would take, pushed as float32."""
        wide = {
            name: shard.to(torch.float64)
            for name, shard in self.sharded(seed).items()
            if name in self.manifest.tensors
        }
        return self.pusher.push(wide, dtype=torch.float32)

    def compiled(self, seed: int) -> Any:
        return self.pusher.push(self.sharded(seed, "_orig_mod."))

    def streamed(self, seed: int, without: str = "") -> Any:
        def gathered() -> Iterator[tuple[str, torch.Tensor]]:
            for name, shard in self.sharded(seed).items():
                if name in self.manifest.tensors and name != without:
                    yield name, shard.full_tensor()

        return self.pusher.push(gathered())

    def other_names(self, rank: int) -> Any:
        tensors = self.sharded(1)
        if self.rank == rank:
            tensors["another"] = tensors.pop("model.norm.weight")
        return self.pusher.push(tensors)

    def raises(self, rank: int) -> Any:
        num_seen = 0

        def broken(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal num_seen
            num_seen += not tensor.is_meta
            if self.rank == rank and num_seen > 8:
                raise ValueError(f"a bad name map at {name}")
            yield name, tensor

        return self.pusher.push(self._mapped(1), name_map=broken)

    def dies(self, rank: int, seconds: float = 0.0) -> Any:
        """One rank is killed, or sleeps, at its fifth tensor."""
        num_seen = 0

        def ending(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal num_seen
            num_seen += not tensor.is_meta
            if self.rank == rank and num_seen == 5 and not tensor.is_meta:
                if not seconds:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(seconds)
            yield name, tensor

        return self.pusher.push(self._mapped(1), name_map=ending)

    def late(self, rank: int, seconds: float) -> Any:
        tensors = self.sharded(2)
        if self.rank == rank:
            time.sleep(seconds)
        return self.pusher.push(tensors)

    def _mapped(self, seed: int) -> dict[str, Any]:
        return {name: one for name, one in self.sharded(seed).items() if name != TIED}


def main(run: str, model_path: str, meet: str, rank: int, num_ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=num_ranks)
    trainer = Trainer(run, model_path)
    print(json.dumps({"writers": trainer.pusher.writers}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        started = time.monotonic()
        try:
            report = getattr(trainer, command.pop("do"))(**command)
            found = {
                "version": report.weight_version,
                "phases": list(report.phase_s),
                "stages": [asdict(stage) for stage in report.push_stages],
            }
        except Exception as error:
            found = {"error": str(error), "type": type(error).__name__}
        found["seconds"] = time.monotonic() - started
        found["shm_bytes"] = trainer.pusher.pool.num_bytes()
        print(json.dumps(found), flush=True)
    trainer.pusher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
