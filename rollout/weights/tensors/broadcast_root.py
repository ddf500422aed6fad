"""The trainer's side of a broadcast group: opens the TCP store, joins as rank 0, sends.

Always true: the store runs in this process, or in that of the trainer's rank 0, as long as the
group exists.  It is closed at the deadline, which ends the wait of engines for others that did not
join.  A late broadcast ends the group, which ends the wait of its receivers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from rollout.core.errors import WeightsUnavailable


class BroadcastRoot:
    """Rank 0 of one group.

    Attributes:
        name: unique, so that a late engine cannot join a later group.
        backend: ``gloo`` or ``nccl``.

    Args:
        host: address of this machine for the engines.
        join_timeout_s: for all engines to join.
        send_timeout_s: for one bucket.
    """

    def __init__(
        self,
        group_name: str,
        backend: str,
        *,
        host: str = "127.0.0.1",
        join_timeout_s: float,
        send_timeout_s: float,
    ) -> None:
        self.name = group_name
        self.backend = backend
        self._host = host
        self._join_timeout_s = join_timeout_s
        self._send_timeout = timedelta(seconds=send_timeout_s)
        self._world_size = 0
        self._store: Any = None
        self._group: Any = None

    @property
    def is_there(self) -> bool:
        """Whether the group exists: a trainer's ``destroy_process_group()`` ends all groups."""
        return self._group in distributed_c10d._world.pg_map

    def terms(self, num_ranks: int) -> Mapping[str, Any]:
        """Open the TCP store; returns the address for the engines, which have so many ranks."""
        self._world_size = num_ranks + 1
        self._store = self._store_at(self._host, 0, is_master=True)
        return {
            "master_address": self._host,
            "master_port": self._store.port,
            "world_size": self._world_size,
        }

    def join_at(self, terms: Mapping[str, Any]) -> None:
        """``join`` through the store of another process, which returned these terms.

        Raises:
            WeightsUnavailable: as ``join``, or the store is not there.
        """
        self._world_size = terms["world_size"]
        address, port = terms["master_address"], terms["master_port"]
        try:
            self._store = self._store_at(address, port, is_master=False)
        except RuntimeError as error:
            raise WeightsUnavailable(f"group {self.name}: {address}:{port}: {error}") from error
        self.join()

    def _store_at(self, host: str, port: int, *, is_master: bool) -> Any:
        return torch.distributed.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            self._world_size,
            is_master=is_master,
            timeout=timedelta(seconds=self._join_timeout_s),
            wait_for_workers=False,
        )

    def join(self) -> None:
        """Returns when all have joined.

        Raises:
            WeightsUnavailable: an engine did not join in time; the group is closed.
        """
        timeout = timedelta(seconds=self._join_timeout_s)
        try:
            self._group, _ = distributed_c10d._new_process_group_helper(
                self._world_size,
                0,
                [],
                distributed_c10d.Backend(self.backend),
                distributed_c10d.PrefixStore(self.name, self._store),
                group_name=self.name,  # type: ignore[arg-type]
                timeout=timeout,
            )
            ranks = {rank: rank for rank in range(self._world_size)}
            distributed_c10d._world.pg_group_ranks[self._group] = ranks
            # Joining may take longer than sending.  A broadcast without receivers delays the end of
            # the group by this timeout.
            distributed_c10d._set_pg_timeout(self._send_timeout, self._group)
        except (RuntimeError, ValueError) as error:
            self.close()
            raise WeightsUnavailable(
                f"not all {self._world_size - 1} ranks of the engines joined group {self.name} "
                f"within {self._join_timeout_s:g} s: {error}"
            ) from error

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast the tensors in order.

        Raises:
            WeightsUnavailable: an engine did not receive them in time; the group is closed.
        """
        try:
            works = [
                torch.distributed.broadcast(
                    tensor.contiguous(), src=0, group=self._group, async_op=True
                )
                for tensor in tensors
            ]
            for work in works:
                work.wait(self._send_timeout)
        except RuntimeError as error:
            with suppress(RuntimeError):
                self._group.abort()  # ends NCCL kernels that wait on the device
            self.close()
            raise WeightsUnavailable(f"broadcast in {self.name} failed: {error}") from error

    def close(self) -> None:
        """Leave the group, and close the store."""
        group, is_there = self._group, self.is_there
        self._group = self._store = None
        if is_there:
            torch.distributed.destroy_process_group(group)
