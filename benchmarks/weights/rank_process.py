"""One rank of a trainer: does what its standard input says, and prints a line of JSON for each.

    python -m benchmarks.weights.rank_process RUN MODEL MEET RANK NUM_RANKS

All ranks hold the same tensors, whole and as shards of the first dimension.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pybase64
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rollout
from engines.http.client import EngineClient
from rollout.weights.tensors import PushPlanCache
from rollout.weights.tensors.payload import flattened_bucket
from rollout.weights.tensors.shard_gather import gathered_whole
from rollout.weights.tensors.sources import PlannedSource

_SAMPLE_S = 0.001


def _client(engine: Any) -> EngineClient:
    client = EngineClient(engine.endpoint)
    client.authorize(engine.access)
    return client


class Rank:
    def __init__(self, run: str, model: str) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        held = load_file(Path(model) / "model.safetensors")
        # Not the pages of the file: a push would wait for the disk.
        self.whole = {name: tensor.clone() for name, tensor in held.items()}
        self.shards = {
            name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in self.whole.items()
        }
        server = rollout.connect(run)["policy"]
        self.engines = server.status().result(60.0).groups[0].engines
        self.pusher = server.pusher()
        self.bucket_bytes = self.pusher.rank.config.weights.bucket_bytes
        self.plans = PushPlanCache()
        self._groups: dict[int, Any] = {}

    def replicated(self) -> dict[str, Any]:
        return self._pushed(self.whole)

    def sharded(self) -> dict[str, Any]:
        return self._pushed(self.shards)

    def generator(self) -> dict[str, Any]:
        return self._pushed(self._gathered())

    def gather(self) -> dict[str, Any]:
        """Only the gathers of a push of shards, in its buckets."""
        shards = list(self.shards.items())
        source = PlannedSource(shards, plans=self.plans, is_on_all_ranks=True)
        for pairs, _ in source.buckets(self.bucket_bytes):
            del pairs
        dist.barrier()
        return {}

    def memory(self) -> dict[str, Any]:
        """A push of a generator, with the memory that it takes beyond the model."""
        with _Memory() as memory:
            self.generator()
        return {
            "beyond_model_buckets": memory.more_bytes / self.bucket_bytes,
            "peak_rss_mib": memory.peak_bytes / 2**20,
        }

    def peer(self) -> dict[str, Any]:
        """As slime does: the ranks of an engine send pickled buckets to its first rank.

        With its CUDA handles the pickles are small; between CPUs they hold the tensors.
        """
        rank, num_ranks, engines = dist.get_rank(), dist.get_world_size(), self.engines
        ranks_of = [
            [one for one in range(num_ranks) if one * len(engines) // num_ranks == engine]
            for engine in range(len(engines))
        ]
        if not self._groups:
            self._groups = {
                engine: dist.new_group(ranks) for engine, ranks in enumerate(ranks_of) if ranks
            }
        (own,) = [engine for engine, ranks in enumerate(ranks_of) if rank in ranks]
        # A single rank is the first rank of both engines.
        fed = [own] if num_ranks >= len(engines) else list(range(len(engines)))
        is_first = rank == ranks_of[own][0]
        clients = [_client(engines[engine]) for engine in fed] if is_first else []
        sent = asyncio.run(self._feed(clients, ranks_of[own], self._groups[own]))
        return {"sent": sent}

    async def _feed(self, engines: list[EngineClient], ranks: list[int], group: Any) -> int:
        sent = 0
        for engine in engines:
            await engine.begin_weight_update()
        for pairs, is_last in self._buckets():
            payload = pybase64.b64encode_as_string(flattened_bucket(pairs))
            payloads = [None] * len(ranks) if engines else None
            dist.gather_object(payload, payloads, dst=ranks[0], group=group)
            if payloads is not None:
                # An engine with one GPU takes one; the others were only gathered.
                await asyncio.gather(
                    *(
                        engine.update_weights_from_tensor(
                            [str(payloads[0])],
                            load_format="flattened_bucket",
                            flush_cache=is_last,
                        )
                        for engine in engines
                    )
                )
            sent += sum(tensor.nbytes for _, tensor in pairs)
            del pairs, payload, payloads
        for engine in engines:
            await engine.end_weight_update()
            await engine.aclose()
        dist.barrier()
        return sent

    def _pushed(self, tensors: Any) -> dict[str, Any]:
        report = self.pusher.push(tensors)
        stages = [one for one in report.push_stages if one.rank == dist.get_rank()]
        (sent,) = [one.num_bytes for one in stages if one.stage == "copy"]
        return {"sent": sent} | {f"{one.stage}_s": one.elapsed_s for one in stages}

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shard in self.shards.items():
            yield name, gathered_whole([shard])[0]

    def _buckets(self) -> Iterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
        held: list[tuple[str, torch.Tensor]] = []
        num_bytes = 0
        for name, tensor in self._gathered():
            if held and num_bytes + tensor.nbytes > self.bucket_bytes:
                bucket, held, num_bytes = held, [], 0
                yield bucket, False
                del bucket
            held.append((name, tensor))
            num_bytes += tensor.nbytes
        yield held, True


class _Memory:
    """Memory of this process while the block runs, sampled.

    Attributes:
        more_bytes: beyond the begin, without shared memory: the slots are counted by their pool.
        peak_bytes: resident, of all kinds.
    """

    def __enter__(self) -> _Memory:
        self._first = self._last = _resident("RssAnon")
        self.peak_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def more_bytes(self) -> int:
        return self._last - self._first

    def _sample(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            self._last = max(self._last, _resident("RssAnon"))
            self.peak_bytes = max(self.peak_bytes, _resident("VmRSS"))


def _resident(kind: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"/proc/self/status has no {kind}")


def main() -> None:
    run, model, meet, rank, num_ranks = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=int(rank), world_size=int(num_ranks)
    )
    trainer = Rank(run, model)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(trainer, command.pop("do"))(**command)), flush=True)
    trainer.pusher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
