"""One rank of a sharded trainer: rank 0 writes a push, the others take part.

``fsdp_worker RANK FOLDER [DEVICE NUM_RANKS]``; all ranks of ``cuda`` share the first GPU.
"""

import json
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rollout.config import Transport, WeightsConfig
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import read_checkpoint_manifest
from rollout.weights.push.shm_buffers import ShmBufferPool
from rollout.weights.tensors import PushSender, TrainerWeights, bytes_fingerprint, take_part

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


def push_tied(rank: int, shards: dict[str, DTensor], folder: Path) -> None:
    """The same with a second name for the first tensor, which the checkpoint does not have."""
    checkpoint = folder / "checkpoint"
    if rank == 0:
        checkpoint.mkdir()
        save_file(
            {name: torch.empty(shard.shape) for name, shard in shards.items()},
            checkpoint / "model.safetensors",
        )
    dist.barrier()
    first, *_ = shards.items()
    tied = {**shards, "tied." + first[0]: first[1].detach()}
    if rank == 0:
        expected = read_checkpoint_manifest(checkpoint)
        weights = TrainerWeights(tied, bucket_bytes=BUCKET_BYTES, expected=expected)
        assert set(weights.manifest.tensors) == set(shards)
        for pairs, _ in weights.gathered():
            del pairs
    else:
        # It would gather one tensor more than the pushing rank.
        with pytest.raises(WeightMismatch, match="are tied: take_part needs model_path"):
            take_part(tied, bucket_bytes=BUCKET_BYTES)
        take_part(tied, bucket_bytes=BUCKET_BYTES, model_path=checkpoint)


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
    counting = Counting()
    if rank == 0:
        weights = TrainerWeights(shards, bucket_bytes=BUCKET_BYTES, name_map=counting)
        pool = ShmBufferPool(folder)
        settings = WeightsConfig(bucket_bytes=BUCKET_BYTES)
        outgoing = PushSender(settings, pool).send(
            weights, 1, Transport.SHARED_MEMORY, may_stream=False
        )
        report = {
            "has_shards": weights.has_shards,
            "buckets": weights.num_buckets,
            "most": counting.most,
            "alive": counting.alive,
            "total": counting.total,
            "equal": outgoing.push.manifest.fingerprints
            == {name: bytes_fingerprint(name, value) for name, value in whole.items()},
        }
        (folder / "report.json").write_text(json.dumps(report))
        pool.close()
    else:
        take_part(shards, bucket_bytes=BUCKET_BYTES, name_map=counting)
        assert counting.most <= BUCKET_BYTES
    push_tied(rank, shards, folder)
    # A thread of gloo's lets go of the last collective's tensors a moment after it; in a process
    # that is ending by then, torch aborts.  After a barrier that collective is not the last.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4], *map(int, sys.argv[4:5]))
