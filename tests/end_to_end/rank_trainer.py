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
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rollout
from engines.protocol import Endpoint
from rollout.control.server.server import RolloutServer
from rollout.core.types import EngineStatus, ServerStatus
from rollout.config import EngineKind, Transport
from rollout.runtime.handle.load_costs import LoadCosts
from rollout.runtime.handle.pusher import Pusher
from rollout.weights.format.manifest import read_checkpoint_manifest

TIED = "lm_head.weight"


class FarEngine:
    """A caller for which one engine is on another host.

    Attributes:
        ways: engine id -> the name of its way in the last push that was sent here.
    """

    def __init__(self, caller: Any, engine_id: str, own_host: str) -> None:
        self._caller = caller
        self._engine_id = engine_id
        self._own_host = own_host
        self.ways: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._caller, name)

    def own_host(self) -> str:
        return self._own_host

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        pending = self._caller.call(method, *args, **kwargs)
        if method is not RolloutServer.status:
            return pending
        return SimpleNamespace(result=lambda *timeout: self._moved(pending.result(*timeout)))

    def ship(self, push: Any) -> Any:
        self.ways = {engine_id: way.name for engine_id, way in push.carrier.ways.items()}
        return self._caller.ship(push)

    def _moved(self, status: ServerStatus) -> ServerStatus:
        groups = tuple(
            replace(group, engines=tuple(map(self._moved_engine, group.engines)))
            for group in status.groups
        )
        return replace(status, groups=groups)

    def _moved_engine(self, engine: EngineStatus) -> EngineStatus:
        if engine.engine_id != self._engine_id:
            return engine
        return replace(engine, endpoint=Endpoint("192.0.2.1", engine.endpoint.port))


class Trainer:
    def __init__(self, run: str, model_path: str) -> None:
        self.ways: dict[str, str] = {}
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

    def push_by(self, transport: str, seed: int, is_streamed: bool = False, **more: Any) -> Any:
        config = self.pusher.config
        weights = config.weights.model_copy(update={"transport": Transport(transport), **more})
        self.pusher.config = config.model_copy(update={"weights": weights})
        return self.streamed(seed) if is_streamed else self.push(seed)

    def push_far(self, far: str, own_host: str, seed: int, is_streamed: bool = False) -> Any:
        """One engine listens on another host, as far as this rank knows."""
        caller = self.pusher.caller
        self.pusher.caller = FarEngine(caller, far, own_host)
        try:
            return self.streamed(seed) if is_streamed else self.push(seed)
        finally:
            self.ways = self.pusher.caller.ways
            self.pusher.caller = caller

    def push_at_once(self, seed: int) -> Any:
        """As to engines for which each load costs."""
        config = self.pusher.config
        groups = {
            name: group.model_copy(
                update={"engine": group.engine.model_copy(update={"kind": EngineKind.SGLANG})}
            )
            for name, group in config.groups.items()
        }
        self.pusher.loads = LoadCosts(config.model_copy(update={"groups": groups}))
        return self.push(seed)

    def turn(self, seed: int, fails_on: int | None = None) -> Any:
        def before_kv() -> None:
            if self.rank == fails_on:
                raise ValueError("the optimizer does not fit on the host")

        return self.pusher.push(self.sharded(seed), before_kv=before_kv)

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
            found = {"version": report.weight_version, "phases": list(report.phase_s)}
        except Exception as error:
            found = {"error": str(error), "type": type(error).__name__}
        found["seconds"] = time.monotonic() - started
        found["ways"] = trainer.ways
        found["shm_bytes"] = trainer.pusher.pool.num_bytes()
        print(json.dumps(found), flush=True)
    trainer.pusher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
