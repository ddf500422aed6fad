"""The one rank of a push's group beside a trainer's own group, in a process of its own, as JSON.

``lone_rank DEVICE``: the default group is bound to the GPU, as torch advises; two ranks on one GPU
are refused by NCCL, so this is all that one GPU can show.
"""

from __future__ import annotations

import json
import socket
import sys
from datetime import timedelta

import torch

from engines.tensors.collective.groups import join
from tests.support.gpu.machine import timed

NUM_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}


def main(device: str) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    place = torch.device(device, 0) if device == "cuda" else None
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
        device_id=place,
    )
    groups = []
    join_s = timed(
        lambda: groups.append(
            join(
                master_address="127.0.0.1",
                master_port=free_port(),
                rank=0,
                world_size=1,
                group_name="alone",
                backend=backend,
            )
        )
    )
    tensor = torch.randint(256, (NUM_BYTES[device],), dtype=torch.uint8, device=device)
    before = tensor.clone()
    times = [
        timed(lambda: torch.distributed.broadcast(tensor, src=0, group=groups[0])) for _ in range(4)
    ]
    found = {
        "join_s": join_s,
        "first_s": times[0],
        "seconds": min(times[1:]),
        "num_bytes": tensor.nbytes,
        "is_same": bool(torch.equal(tensor, before)),
    }
    print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main(sys.argv[1])
