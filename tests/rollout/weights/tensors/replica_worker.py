"""One of four ranks of HSDP, two replicas of two shards: ``replica_worker RANK FOLDER ODD``.

Rank ``ODD`` changes one value of its shard of each tensor.  Rank 0 reports what the comparison of
a push says.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rollout.core.errors import WeightMismatch
from rollout.weights.ranks.messages import Fits
from rollout.weights.ranks.protocol import check_replicas
from rollout.weights.tensors import PlannedSource


def compared(shards: dict[str, Any]) -> dict[str, str]:
    """What a push says of each tensor; empty if its copies are equal."""
    source, said = PlannedSource(shards, is_on_all_ranks=True), {}
    for name in source.copies():
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, source.digests_of([name]))
        said[name] = ""
        try:
            check_replicas([Fits(one) for one in found])
        except WeightMismatch as error:
            said[error.tensor] = str(error)
    return said


def main(rank: int, folder: Path, odd: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=4
    )
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Sequential(torch.nn.Linear(9, 11), torch.nn.Linear(11, 9, bias=False))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    both = [Replicate(), Shard(1)]
    shards = model.state_dict() | {
        "columns": distribute_tensor(torch.randn(3, 4), mesh, both),
        "short": distribute_tensor(torch.randn(1, 4), mesh, [Replicate(), Shard(0)]),
        "whole": distribute_tensor(torch.randn(3, 4), mesh, [Replicate(), Replicate()]),
        "once": distribute_tensor(torch.randn(4, 4), mesh, [Shard(0), Shard(1)]),
    }
    if rank == odd:
        for shard in shards.values():
            shard.to_local().detach().view(-1)[-1:] += 2.0**-20
    (folder / f"report-{rank}.json").write_text(json.dumps(compared(shards)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # as in fsdp_worker
