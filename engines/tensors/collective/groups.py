"""Process groups a trainer broadcasts weights through, joined and left by name.

Always true: every wait has a deadline; a group whose rank 0 is gone, or in which a broadcast
failed, is left, even without a command, and nothing refers to it then: its connections close with
it, which is how the ranks that wait for this one notice.  The embedded engine does not wait on its
generation thread; a worker of vLLM has no other.

The rendezvous is the one SGLang makes (a TCP store, prefixed with the group's name), so that a
trainer need not know which kind of engine it talks to.  SGLang has neither deadlines nor a look at
rank 0: there a group lasts until ``destroy_weights_update_group`` names it.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from engines.process.background import Then, keep_thread
from engines.tensors.collective.bucket import BroadcastRefused
from engines.tensors.collective.buffers import finished
from engines.tensors.collective.new_group import new_group

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0
RECEIVE_TIMEOUT_S = 300.0
# A host that was switched off sends nothing: without a reply for so long it counts as gone.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


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
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=timeout_s)
    address = f"tcp://{master_address}:{master_port}"
    store, rank, world_size = next(rendezvous(address, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return new_group(
        world_size, rank, store=store, name=group_name, backend=backend, timeout=timeout
    )


@dataclass(slots=True, eq=False)
class _JoinedGroup:
    """One group.

    Attributes:
        group: None when it was left.
        line: connection to the rendezvous, which lives as long as rank 0, or None if it had gone.
        in_use: held while something is received.
    """

    group: Any
    line: socket.socket | None
    in_use: threading.Lock = field(default_factory=threading.Lock)


class UpdateGroups:
    """The groups that an engine, or one rank of it, has joined.  Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._groups: dict[str, _JoinedGroup] = {}

    def names(self) -> list[str]:
        return sorted(self._groups)

    def join(self, *, group_name: str, backend: str, **where: Any) -> None:
        """Blocks until all have joined, ``JOIN_TIMEOUT_S`` at most."""
        if group_name in self._groups:
            raise BroadcastRefused(f"weight update group {group_name!r} exists already")
        if self._device.type == "cpu" and backend != "gloo":
            raise BroadcastRefused(
                f"backend {backend!r} needs a GPU; this engine runs on CPU: use gloo"
            )
        try:
            timeout_s = JOIN_TIMEOUT_S
            group = join(group_name=group_name, backend=backend, timeout_s=timeout_s, **where)
        except (RuntimeError, ValueError, OSError) as error:
            raise BroadcastRefused(
                f"could not join weight update group {group_name!r} within "
                f"{JOIN_TIMEOUT_S:g} s: {error}"
            ) from error
        # Torch would end a receive after the time for joining.
        receiving = timedelta(seconds=RECEIVE_TIMEOUT_S)
        torch.distributed.distributed_c10d._set_pg_timeout(receiving, group)
        joined = _JoinedGroup(group, _line_to(where["master_address"], where["master_port"]))
        with self._lock:
            self._groups[group_name] = joined
        if joined.line is not None:
            keep_thread(partial(self._watch, group_name, joined), "update-group", Then.IS_OVER)

    def leave(self, group_name: str) -> None:
        with self._lock:
            joined = self._get(group_name)
            del self._groups[group_name]
        _destroy(joined)

    def receive(self, parts: Sequence[torch.Tensor], *, group_name: str) -> None:
        """Blocks until rank 0 has broadcast into each of these, one after the other."""
        joined = self._get(group_name)
        why = ""
        try:
            with joined.in_use:
                for part in parts:
                    _receive(part, joined.group)
                finished(self._device)
        except RuntimeError as error:
            why = str(error)
        if why:  # without the error, whose frames refer to the group
            self._abandon(group_name, joined)
            raise BroadcastRefused(f"broadcast in {group_name!r} failed: {why}; it was left")

    def _watch(self, group_name: str, joined: _JoinedGroup) -> None:
        """Nothing is sent on this connection; it ends with rank 0, or when the group is left."""
        assert joined.line is not None
        with suppress(OSError):
            while joined.line.recv(1):
                pass
        joined.line.close()
        # What is received fails by itself: the peer has closed.
        if self._abandon(group_name, joined):
            logger.info("left weight update group %s: its rank 0 is gone", group_name)

    def _abandon(self, group_name: str, joined: _JoinedGroup) -> bool:
        """Leave a group that no longer works; False if that was done."""
        with self._lock:
            if self._groups.get(group_name) is not joined:
                return False
            del self._groups[group_name]
        with joined.in_use:
            _destroy(joined)
        return True

    def _get(self, group_name: str) -> _JoinedGroup:
        joined = self._groups.get(group_name)
        if joined is None:
            raise BroadcastRefused(
                f"no weight update group {group_name!r}; call init_weights_update_group first"
            )
        return joined


def _line_to(host: str, port: int) -> socket.socket | None:
    try:
        line = socket.create_connection((host, port), timeout=JOIN_TIMEOUT_S)
    except OSError as error:
        logger.warning("%s:%d is not watched, it takes no connection: %s", host, port, error)
        return None
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        line.setsockopt(socket.IPPROTO_TCP, option, value)
    return line


def _receive(part: torch.Tensor, group: Any) -> None:
    if group is None:
        raise RuntimeError("its rank 0 is gone")
    work = torch.distributed.broadcast(part, src=0, group=group, async_op=True)
    work.wait(timedelta(seconds=RECEIVE_TIMEOUT_S))


def _destroy(joined: _JoinedGroup) -> None:
    group, joined.group = joined.group, None
    if joined.line is not None:
        with suppress(OSError):  # it has ended
            joined.line.shutdown(socket.SHUT_RDWR)
    torch.distributed.destroy_process_group(group)
