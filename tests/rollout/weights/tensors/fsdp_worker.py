"""One rank of a sharded trainer: all gather their shards bucket by bucket.

``fsdp_worker RANK FOLDER [DEVICE NUM_RANKS]``; all ranks of ``cuda`` share the first GPU.
"""

import json
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rollout.core.errors import WeightMismatch
from rollout.weights.tensors import PushPlanCache, bytes_fingerprint, sources
from rollout.weights.tensors.shard_gather import gathered_whole
from rollout.weights.tensors.sources import PlannedSource, StreamedSource
from tests.support.still_server import make_push

BUCKET_BYTES = 3000


class Counting:
    """Counts the bytes of whole tensors that are alive, by the tensors themselves."""

    def __init__(self) -> None:
        self.alive = self.most = self.total = 0

    def __call__(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if not tensor.is_meta:
            assert not isinstance(tensor, DTensor)
            self.alive += tensor.nbytes
            self.total += tensor.nbytes
            self.most = max(self.most, self.alive)
            weakref.finalize(tensor, self._drop, tensor.nbytes)
        yield name, tensor

    def _drop(self, num_bytes: int) -> None:
        self.alive -= num_bytes


def main(rank: int, folder: Path, device: str = "cpu", num_ranks: int = 2) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=num_ranks
    )
    torch.manual_seed(0)  # the same model on all ranks, before it is cut
    model = torch.nn.Sequential(*(torch.nn.Linear(17, 17) for _ in range(8)))
    whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.to(device)
    mesh = init_device_mesh(device, (num_ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shards = model.state_dict()
    assert all(isinstance(value, DTensor) for value in shards.values())
    # One rank of several cannot gather: it says so, and no rank waits for it.
    refused = pytest.raises(WeightMismatch, match=rf"sharded over {num_ranks} ranks.*policy.pusher")
    with refused if num_ranks > 1 else nullcontext():
        push = make_push(shards, version=1, bucket_bytes=BUCKET_BYTES)
        assert set(push.manifest.tensors) == set(whole)
    counting = Counting()
    source = PlannedSource(shards, name_map=counting, plans=PushPlanCache(), is_on_all_ranks=True)
    found: dict[str, str] = {}
    num_buckets = 0
    for pairs, _ in source.buckets(BUCKET_BYTES):
        found |= {name: bytes_fingerprint(name, tensor) for name, tensor in pairs}
        num_buckets += 1
        del pairs
    streamed = Counting()
    generated = StreamedSource(iter(shards.items()), expected=None, name_map=streamed, dtype=None)
    num_gathers = 0
    streamed_found: dict[str, str] = {}
    with patch.object(sources, "gathered_whole", wraps=gathered_whole) as gathers:
        for pairs, _ in generated.buckets(BUCKET_BYTES):
            streamed_found |= {name: bytes_fingerprint(name, tensor) for name, tensor in pairs}
            del pairs
        num_gathers = gathers.call_count
    report = {
        "streamed": {
            "gathers": num_gathers,
            "most": streamed.most,
            "alive": streamed.alive,
            "equal": streamed_found == found,
        },
        "buckets": num_buckets,
        "most": counting.most,
        "alive": counting.alive,
        "total": counting.total,
        "equal": found == {name: bytes_fingerprint(name, value) for name, value in whole.items()},
    }
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4], *map(int, sys.argv[4:5]))
    # A thread of gloo's lets go of a collective's tensors a moment after it.  If the interpreter is
    # ending by then, torch aborts, also after the group was destroyed.
    os._exit(0)
