"""Makes process groups beside torch's default one, which may be a trainer's.

Always true: such a group has a communicator of its own.  Torch splits one by NCCL from that of the
default group if ``init_process_group`` was given a device.  A split is a collective of all ranks of
the default group, and only one of them is in ours: it would wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

# A second group would take the first one's None for the device of the default group.
_lock = threading.Lock()


def new_group(
    world_size: int, rank: int, *, store: Any, name: str, backend: str, timeout: timedelta
) -> Any:
    """A group of these ranks, none of which need be in the default group.

    Args:
        store: where its ranks meet.
        timeout: for all to join, and for each collective.

    Raises:
        RuntimeError: not all ranks joined in time.
    """
    from torch.distributed import distributed_c10d

    with unsplit(backend):
        group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            distributed_c10d.Backend(backend),
            distributed_c10d.PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]
            timeout=timeout,
        )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


@contextmanager
def unsplit(backend: str) -> Iterator[None]:
    """A block in which torch splits no group by this backend from the default group.

    Other threads see a default group without a device meanwhile.  Gloo splits nothing here, and
    waits in the block for all members, so with it they see what there is.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if backend == "gloo" or not dist.is_initialized():
        yield
        return
    default: Any = distributed_c10d._get_default_group()
    with _lock:
        device = default.bound_device_id
        default.bound_device_id = None
        try:
            yield
        finally:
            default.bound_device_id = device
