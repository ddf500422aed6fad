"""One rank of a trainer, for ``test_rank_push``: does what its standard input says, one line each.

It prints one line of JSON for each command.  Every rank has the same tensors, drawn from a seed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rollout
from engines.protocol import Endpoint
from rollout.config import EncodingChoice, EngineKind, Transport
from rollout.control.server.server import RolloutServer
from rollout.core.types import EngineStatus, ServerStatus
from rollout.runtime.handle.pusher import Pusher
from rollout.weights.format.manifest import read_checkpoint_manifest
from rollout.weights.ranks.trainer_rank import LoadCosts
from rollout.weights.routes.trainer_groups import BroadcastRoot
from tests.support.lora import drawn_adapter
from tests.support.megatron_shards import MegatronShards, Sizes

# clock: a rank is late, and less than the others wait.

TIED = "lm_head.weight"
TIMEOUT_S = 4


class FarEngine:
    """A caller for which one engine is on another host, or all.

    Attributes:
        ways: engine id -> its payload in the last push that was sent here; or ``all`` -> the route.
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
        self.ways = {engine_id: one.payload for engine_id, one in push.routes.items()}
        if not push.routes:
            self.ways = {"all": type(push.route).__name__}
        return self._caller.ship(push)

    def _moved(self, status: ServerStatus) -> ServerStatus:
        groups = tuple(
            replace(group, engines=tuple(map(self._moved_engine, group.engines)))
            for group in status.groups
        )
        return replace(status, groups=groups)

    def _moved_engine(self, engine: EngineStatus) -> EngineStatus:
        if self._engine_id not in ("all", engine.engine_id):
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
        self.model_path = Path(model_path)
        self.megatrons: MegatronShards | None = None
        self.policy = rollout.connect(run)["policy"]
        self.pusher: Pusher = self.policy.pusher(rank_timeout_s=TIMEOUT_S)

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

    def replica(self, seed: int, odd: int, added: float | None, kind: str = "plain") -> Any:
        """Whole tensors on each rank, as with DDP; on one rank with other values.

        Args:
            added: to each value of the odd rank; None makes one value NaN.
            kind: ``plain``, ``streamed`` from an iterator, or ``replicated`` DTensors.
        """
        whole = self.whole(seed)
        for tensor in whole.values() if self.rank == odd else ():
            if added is None:
                tensor.view(-1)[-1] = torch.nan
            else:
                tensor += added
        if kind == "replicated":
            whole = {
                name: DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)
                for name, tensor in whole.items()
            }
        return self.pusher.push(iter(whole.items()) if kind == "streamed" else whole)

    def adapter(self, seed: int, config: Mapping[str, Any]) -> Any:
        """A LoRA adapter whose halves are sharded, of one that ``drawn_adapter`` draws."""
        named = drawn_adapter(self.model_path, seed, config)
        shards = {
            name: distribute_tensor(one, self.mesh, [Shard(0)]) for name, one in named.items()
        }
        return self.pusher.push(shards, adapter=config)

    def check_path(self) -> Any:
        whole = load_file(self.model_path / "model.safetensors")
        shards = {
            name: distribute_tensor(whole[name], self.mesh, [Shard(0)])
            for name in self.manifest.tensors
        }
        return self.pusher.check_push_path(shards)

    def offload(self, without: int | None = None) -> Any:
        """All ranks but one, which pushes instead."""
        return self.pusher.push(self.whole(1)) if self.rank == without else self.pusher.offload()

    def push_by(self, transport: str, seed: int, is_streamed: bool = False, **more: Any) -> Any:
        rank = self.pusher.rank
        config = rank.config
        weights = config.weights.model_copy(update={"transport": Transport(transport), **more})
        rank.config = config.model_copy(update={"weights": weights})
        try:
            return self.streamed(seed) if is_streamed else self.push(seed)
        finally:
            rank.config = config

    def push_far(
        self,
        far: str,
        own_host: str,
        seed: int,
        is_streamed: bool = False,
        hosts: Sequence[int] = (),
        fault: Mapping[str, Any] | None = None,
        encoding: str = "full",
    ) -> Any:
        """One engine listens on another host, as far as this rank knows.

        Args:
            hosts: of each rank the lowest one on its host, if they have several.
            fault: the arguments of ``at_broadcast``.
        """
        server, rank = self.pusher.server, self.pusher.rank
        caller, hosts_before, before = server.caller, rank.hosts, rank.config
        weights = before.weights.model_copy(update={"encoding": EncodingChoice(encoding)})
        rank.config = before.model_copy(update={"weights": weights})
        moved = FarEngine(caller, far, own_host)
        server.caller, rank.hosts = moved, list(hosts) or hosts_before
        try:
            with self.at_broadcast(**(fault or {})):
                return self.streamed(seed) if is_streamed else self.push(seed)
        finally:
            self.ways = moved.ways
            server.caller, rank.hosts, rank.config = caller, hosts_before, before

    @contextmanager
    def at_broadcast(
        self, task: str = "send", number: int = 0, does: str = "", pid: int = 0
    ) -> Iterator[None]:
        """The rank that broadcasts does something before it joins the engines, or sends."""
        carry_out, num_done = getattr(BroadcastRoot, task), 0

        def acting(root: BroadcastRoot, *tensors: Any) -> None:
            nonlocal num_done
            if does and num_done == number:
                self._act(does, pid)
            num_done += 1
            carry_out(root, *tensors)

        with patch.object(BroadcastRoot, task, acting):
            yield

    def _act(self, does: str, pid: int) -> None:
        if does == "raises":
            raise ValueError("a bad cable")
        os.kill(pid or os.getpid(), signal.SIGSTOP if does == "stops" else signal.SIGKILL)

    def push_at_once(self, seed: int) -> Any:
        """As to engines for which each load costs."""
        config = self.pusher.rank.config
        groups = {
            name: group.model_copy(
                update={"engine": group.engine.model_copy(update={"kind": EngineKind.SGLANG})}
            )
            for name, group in config.groups.items()
        }
        self.pusher.rank.loads = LoadCosts(config.model_copy(update={"groups": groups}))
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
                    yield name, shard  # the push gathers it

        return self.pusher.push(gathered())

    def megatron(self, seed: int) -> Any:
        """Shards of tensor and expert parallelism, gathered by a generator."""
        if self.megatrons is None:
            config = json.loads((self.model_path / "config.json").read_text())
            sizes = Sizes(
                config["num_hidden_layers"],
                config["num_key_value_heads"],
                config["head_dim"],
                config["num_local_experts"],
                config["vocab_size"],
            )
            self.megatrons = MegatronShards(self.rank, sizes)
        self.megatrons.cut(self.whole(seed))
        return self.pusher.push(
            self.megatrons.gathered(), name_map=self.megatrons.to_checkpoint, dtype=torch.float32
        )

    def stacked(self, seed: int) -> Any:
        """Experts as transformers 5 holds them, one tensor for all, and FSDP2 shards them."""
        tensors: dict[str, torch.Tensor] = {}
        experts: dict[tuple[str, str], dict[int, torch.Tensor]] = defaultdict(dict)
        for name, tensor in self.whole(seed).items():
            layer, is_expert, rest = name.partition(".experts.")
            if is_expert:
                number, part, _ = rest.split(".")
                experts[f"{layer}.experts", part][int(number)] = tensor
            else:
                tensors[name] = tensor
        for (at, part), of_all in experts.items():
            if part == "up_proj":
                continue
            whole = torch.stack([of_all[number] for number in sorted(of_all)])
            if part == "gate_proj":
                ups = experts[at, "up_proj"]
                whole = torch.cat([whole, torch.stack([ups[one] for one in sorted(ups)])], dim=1)
            tensors[f"{at}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"] = whole
        return self.pusher.push(
            {
                name: distribute_tensor(tensor, self.mesh, [Shard(0)])
                for name, tensor in tensors.items()
            }
        )

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

    def dies(self, rank: int) -> Any:
        """One rank is killed at its fifth tensor."""
        return self.at_tensor(rank, 5, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def stops(self, rank: int) -> Any:
        """One rank is frozen at its fifth tensor, until it gets SIGCONT."""
        return self.at_tensor(rank, 5, lambda: os.kill(os.getpid(), signal.SIGSTOP))

    def waits(self, rank: int) -> Any:
        """One rank waits for a line at its fifth tensor."""
        return self.at_tensor(rank, 5, sys.stdin.readline)

    def kills(self, pid: int, tensor: int) -> Any:
        """Rank 0 kills another process when so many tensors were gathered."""
        return self.at_tensor(0, tensor, lambda: os.kill(pid, signal.SIGKILL))

    def push_model(self, path: str, pid: int = 0) -> Any:
        """A push of another checkpoint, in which rank 0 kills a process if it has a number."""
        whole = load_file(f"{path}/model.safetensors")
        shards = {
            name: distribute_tensor(whole[name], self.mesh, [Shard(0)])
            for name in self.manifest.tensors
        }
        if not pid:
            return self.pusher.push(shards)
        return self.at_tensor(0, 9, lambda: os.kill(pid, signal.SIGKILL), shards)

    def at_tensor(
        self, rank: int, number: int, act: Callable[[], Any], shards: dict[str, Any] | None = None
    ) -> Any:
        """A push in which one rank acts after the gather of one tensor."""
        num_seen = 0

        def acting(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal num_seen
            num_seen += not tensor.is_meta
            if self.rank == rank and num_seen == number and not tensor.is_meta:
                act()
            yield name, tensor

        return self.pusher.push(shards or self._mapped(1), name_map=acting)

    def stays_away(self, rank: int) -> Any:
        """One rank does not call push before it gets a line."""
        tensors = self.sharded(2)
        if self.rank == rank:
            sys.stdin.readline()
        return self.pusher.push(tensors)

    def leaves(self, rank: int) -> Any:
        """One rank raises in the block of a pusher, outside of a call."""
        with self.policy.pusher(rank_timeout_s=60.0) as pusher:
            if self.rank == rank:
                raise ValueError("a bad batch")
            return pusher.push(self.whole(1))

    def generator_raises(self, rank: int, at: int, is_before_gather: bool = False) -> Any:
        """The generator of one rank raises, after or before the gather of a tensor.

        The gathers have a deadline of their own, which is what frees the others.
        """
        seconds = timedelta(seconds=2 * TIMEOUT_S)
        group = dist.new_group(timeout=seconds)

        def gathered() -> Iterator[tuple[str, torch.Tensor]]:
            for number, (name, whole) in enumerate(self.whole(1).items()):
                if self.rank == rank and number == at and is_before_gather:
                    raise ValueError(f"no weights for {name}")
                parts = [torch.empty_like(whole) for _ in range(self.num_ranks)]
                dist.all_gather(parts, whole, group=group)
                if self.rank == rank and number == at:
                    raise ValueError(f"no weights for {name}")
                yield name, parts[0]

        return self.pusher.push(gathered())

    def late(self, rank: int, seconds: float) -> Any:
        tensors = self.sharded(2)
        if self.rank == rank:
            time.sleep(seconds)
        return self.pusher.push(tensors)

    def _mapped(self, seed: int) -> dict[str, Any]:
        """Under a name map, nothing is known to be tied."""
        known = self.manifest.tensors
        return {name: one for name, one in self.sharded(seed).items() if name in known}


def main(run: str, model_path: str, meet: str, rank: int, num_ranks: int) -> None:
    torch.set_num_threads(1)
    # torch 2.8 itself writes to standard output when it has made a gloo group.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=num_ranks)
    trainer = Trainer(run, model_path)
    print(json.dumps({"writers": trainer.pusher.rank.writers}), file=answers, flush=True)
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
        found["ways"] = trainer.ways
        found["shm_bytes"] = trainer.pusher.rank.pool.num_bytes()
        print(json.dumps(found), file=answers, flush=True)
    trainer.pusher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
