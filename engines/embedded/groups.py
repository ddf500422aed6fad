"""Process groups a trainer broadcasts weights through, joined and left by name.

The rendezvous is the one SGLang makes (a TCP store, prefixed with the group's name), so that a
trainer need not know which kind of engine it talks to.  Unlike SGLang's every wait has a
deadline, and none happens on the generation thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from engines.embedded.errors import Invalid

JOIN_TIMEOUT_S = 60.0
RECEIVE_TIMEOUT_S = 300.0


def join(
    *,
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout_s: float = JOIN_TIMEOUT_S,
) -> Any:
    """Join (as rank 0: open) a group beside torch's default one.  Trainers may use it too."""
    from torch.distributed import distributed_c10d
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=timeout_s)
    address = f"tcp://{master_address}:{master_port}"
    store, rank, world_size = next(rendezvous(address, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        distributed_c10d.Backend(backend),
        distributed_c10d.PrefixStore(group_name, store),
        group_name=group_name,  # type: ignore[arg-type]
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


class UpdateGroups:
    """The groups one engine has joined."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._groups

    def join(self, *, group_name: str, backend: str, **where: Any) -> None:
        """Blocks until all have joined, ``JOIN_TIMEOUT_S`` at most."""
        if group_name in self._groups:
            raise Invalid(f"weight update group {group_name!r} exists already")
        if self._device.type == "cpu" and backend != "gloo":
            raise Invalid(f"backend {backend!r} needs a GPU; this engine runs on CPU: use gloo")
        try:
            self._groups[group_name] = join(group_name=group_name, backend=backend, **where)
        except (RuntimeError, ValueError, OSError) as error:
            raise Invalid(
                f"could not join weight update group {group_name!r} within "
                f"{JOIN_TIMEOUT_S:g} s: {error}"
            ) from error

    def leave(self, group_name: str) -> None:
        from torch.distributed import destroy_process_group

        destroy_process_group(self._get(group_name))
        del self._groups[group_name]

    def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        is_bucket: bool,
    ) -> list[tuple[str, torch.Tensor]]:
        """Blocks until rank 0 has broadcast every tensor, or all of them as one bucket."""
        group = self._get(group_name)
        sizes = [
            torch.Size(shape).numel() * d.itemsize for shape, d in zip(shapes, dtypes, strict=True)
        ]
        if is_bucket:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            parts = [flat]
            pieces = torch.split(flat, sizes)
            tensors = [
                piece.view(dtype).view(*shape)
                for piece, dtype, shape in zip(pieces, dtypes, shapes, strict=True)
            ]
        else:
            tensors = [
                torch.empty(tuple(shape), dtype=dtype, device=self._device)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            parts = tensors
        try:
            for part in parts:
                work = torch.distributed.broadcast(part, src=0, group=group, async_op=True)
                work.wait(timedelta(seconds=RECEIVE_TIMEOUT_S))
        except RuntimeError as error:
            raise Invalid(f"broadcast in {group_name!r} failed: {error}") from error
        return list(zip(names, tensors, strict=True))

    def _get(self, group_name: str) -> Any:
        if group_name not in self._groups:
            raise Invalid(
                f"no weight update group {group_name!r}; call init_weights_update_group first"
            )
        return self._groups[group_name]
