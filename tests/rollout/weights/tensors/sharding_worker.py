"""One of four ranks whose tensors are sharded in every way that a trainer shards them.

``sharding_worker RANK FOLDER``; each gathers all of them, and checks them against the whole ones.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from rollout.weights.tensors import PlannedSource

BUCKET_BYTES = 700


def uneven(mesh: DeviceMesh) -> dict[str, tuple[torch.Tensor, Any]]:
    """Rows and columns that four ranks cannot share evenly; some ranks have none."""
    found = {}
    for rows, columns in ((5, 3), (2, 7), (1, 1), (4, 9)):
        for dim in (0, 1):
            whole = torch.randn(rows, columns)
            shard = distribute_tensor(whole, mesh, [Shard(dim)])
            found[f"uneven.{rows}x{columns}.{dim}"] = whole, shard
    return found


def on_two_dimensions(mesh: DeviceMesh) -> dict[str, tuple[torch.Tensor, Any]]:
    found = {}
    for number, placements in enumerate(
        ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()])
    ):
        whole = torch.randn(7, 5)
        found[f"two.{number}"] = whole, distribute_tensor(whole, mesh, placements)
    return found


def of_modules(prefix: str, mesh: DeviceMesh, **options: Any) -> dict[str, tuple[Any, Any]]:
    """Layers of FSDP2: on two dimensions of replicas and shards (HSDP), or beside TP."""
    model = torch.nn.Sequential(torch.nn.Linear(9, 11), torch.nn.Linear(11, 9, bias=False))
    whole = {name: one.detach().clone() for name, one in model.state_dict().items()}
    if "tp" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        mesh = mesh["dp"]
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    shards = model.state_dict()
    assert all(isinstance(one, DTensor) for one in shards.values())
    return {f"{prefix}.{name}": (whole[name], one) for name, one in shards.items()}


def main(rank: int, folder: Path, num_ranks: int = 4) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=num_ranks
    )
    torch.manual_seed(0)
    flat = init_device_mesh("cpu", (4,))
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    beside_tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both = {
        **uneven(flat),
        **on_two_dimensions(replicas),
        **of_modules("hsdp", replicas),
        **of_modules("offloaded", flat, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        **of_modules("beside_tp", beside_tp),
    }
    shards = {name: shard for name, (_, shard) in both.items()}
    weights = PlannedSource(shards, is_on_all_ranks=True)
    found = {name: one.clone() for pairs, _ in weights.buckets(BUCKET_BYTES) for name, one in pairs}
    wrong = [name for name in both if not torch.equal(found[name], both[name][0])]
    assert found.keys() == both.keys()
    assert not wrong, wrong
    (folder / f"report-{rank}.json").write_text(json.dumps({"names": list(found)}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # as in fsdp_worker
