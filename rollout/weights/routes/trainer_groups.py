"""The trainer's end of broadcasts: the group of rank 0 with all engines, which stays from push to
push.

Always true: only rank 0 of the trainer sends, and the group's store runs in its process; one push
at a time uses a group; a group stays only after a push that every engine received; it is closed if
it does not stay, if other engines join, or with the handle.

A new group costs a request to every engine, a connection for each pair of engines and, with NCCL,
seconds.  An idle group costs connections and, with NCCL, buffers on each GPU.  Firewalls drop idle
connections, some after 350 s, and then a push would fail at its deadline.  So a group that was
idle for some minutes is created again.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import distributed_c10d

from engines.tensors.collective.new_group import new_group
from engines.tensors.flattened_bucket import FLATTENED_BUCKET
from rollout.config import ServerConfig
from rollout.core.errors import WeightsUnavailable
from rollout.weights.routes.nccl import backend_of
from rollout.weights.routes.route import BroadcastMember, PushTerms, StreamedBucket
from rollout.weights.tensors.bucket_bytes import (
    FlatLayoutCache,
    Flattener,
    describe_tensors,
    fingerprints_of,
    is_flattened,
    split_bucket,
)
from rollout.weights.tensors.sources import Pairs

logger = logging.getLogger(__name__)

_MOST_IDLE_S = 240.0


class BroadcastRoot:
    """Rank 0 of one group: opens the TCP store, joins, sends.

    Always true: the store runs in this process as long as the group exists.  It is closed at the
    deadline, which ends the wait of engines for others that did not join.  A late broadcast ends
    the group, which ends the wait of its receivers.

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
        self._send_timeout = self._timeout = timedelta(seconds=send_timeout_s)
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
        self._store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            self._host,
            0,
            self._world_size,
            is_master=True,
            timeout=timedelta(seconds=self._join_timeout_s),
            wait_for_workers=False,
        )
        return {
            "master_address": self._host,
            "master_port": self._store.port,
            "world_size": self._world_size,
        }

    def join(self) -> None:
        """Returns when all have joined.

        Raises:
            WeightsUnavailable: an engine did not join in time; the group is closed.
        """
        timeout = timedelta(seconds=self._join_timeout_s)
        try:
            self._group = new_group(
                self._world_size,
                0,
                store=self._store,
                name=self.name,
                backend=self.backend,
                timeout=timeout,
            )
            # NCCL connects in the first broadcast: SGLang makes no collective when it joins.
            is_late = self.backend == "nccl"
            self._set_timeout(self._send_timeout + timeout if is_late else self._send_timeout)
        except (RuntimeError, ValueError) as error:
            self.close()
            raise WeightsUnavailable(
                f"not all {self._world_size - 1} ranks of the engines joined group {self.name} "
                f"within {self._join_timeout_s:g} s: {error}"
            ) from error

    def _set_timeout(self, timeout: timedelta) -> None:
        """For a broadcast.  One without receivers delays the end of the group by it."""
        self._timeout = timeout
        distributed_c10d._set_pg_timeout(timeout, self._group)

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast the tensors in order; by NCCL, the first has the time for joining, too.

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
                work.wait(self._timeout)
            if self._timeout != self._send_timeout:
                self._set_timeout(self._send_timeout)
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


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """A group in which the trainer sends, after all engines have joined.

    Attributes:
        root: the trainer's end.
        idle_since: when its last push ended.
    """

    root: BroadcastRoot
    members: Sequence[BroadcastMember]
    idle_since: float = 0.0


def is_reusable(members: Sequence[BroadcastMember]) -> bool:
    """Whether the next push can recognise a group of these engines."""
    return bool(members) and all(member.process for member in members)


def is_same_group(
    group_name: str, before: Sequence[BroadcastMember], now: Sequence[BroadcastMember]
) -> bool:
    """Whether the group that ``before`` joined can send to the engines in ``now``."""
    same = {member.rank_of for member in before} == {member.rank_of for member in now}
    return same and is_reusable(now) and all(member.group == group_name for member in now)


class IdleGroup:
    """The group of a trainer's last push, for the next one, by whichever call. Thread-safe.

    Attributes:
        layouts: of flat buckets, from earlier pushes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.layouts = FlatLayoutCache()
        self._clock = clock
        self._lock = threading.Lock()
        self._group: JoinedGroup | None = None
        self._is_closed = False

    def take(self) -> JoinedGroup | None:
        """Take the group out; the caller owns it."""
        with self._lock:
            group, self._group = self._group, None
        return group

    def is_fresh(self, group: JoinedGroup) -> bool:
        """Whether it was used recently enough for its connections to work."""
        return self._clock() - group.idle_since <= _MOST_IDLE_S

    def put(self, group: JoinedGroup) -> None:
        """Leave the group to the next push."""
        group = replace(group, idle_since=self._clock())
        with self._lock:
            over = group if self._is_closed else self._group
            if not self._is_closed:
                self._group = group
        if over is not None:  # another push has put one here meanwhile
            over.root.close()

    def leave(self) -> None:
        """Leave the group; the next push makes another."""
        if (group := self.take()) is not None:
            group.root.close()

    def close(self) -> None:
        """Leave the group, and each that comes back; engines notice that the trainer has left."""
        with self._lock:
            self._is_closed = True
        self.leave()


class BroadcastPush:
    """Rank 0's part in one push by broadcast.

    Args:
        host: address of this machine for the engines.
        idle: has the group of the last push, and gets that of this one.
        is_on_cuda: whether the tensors are on a GPU.

    Raises:
        ConfigError: NCCL would fail; nothing was sent.
    """

    def __init__(
        self,
        config: ServerConfig,
        terms: PushTerms,
        host: str,
        idle: IdleGroup,
        *,
        is_on_cuda: bool = False,
    ) -> None:
        self._push = terms
        self._timeout_s = config.weights.group_timeout_s
        self._host = host
        self._idle = idle
        self._flattener = Flattener(idle.layouts)
        self._group: JoinedGroup | None = None
        self._must_join = True
        self._backend = backend_of(config, is_on_cuda=is_on_cuda)

    def terms(self, members: Sequence[BroadcastMember]) -> Mapping[str, Any]:
        """Terms of the group for this push: the idle one if it fits, else a new one."""
        self._group = before = self._idle.take()  # ``ended`` closes it, if this fails
        stays = is_reusable(members)
        if before is not None and self._fits(before, members):
            self._must_join = False
            return {"group_name": before.root.name, "is_new": False, "keeps": stays, "over": ""}
        if before is not None:
            before.root.close()
        root = BroadcastRoot(
            f"push-{self._push.version}-{secrets.token_hex(4)}",
            self._backend,
            host=self._host,
            join_timeout_s=self._timeout_s,
            send_timeout_s=self._timeout_s,
        )
        where = root.terms(sum(member.num_ranks for member in members))
        self._group = JoinedGroup(root, tuple(members))
        terms = {**where, "group_name": root.name, "backend": self._backend, "keeps": stays}
        return {**terms, "is_new": True, "over": "" if before is None else before.root.name}

    def _fits(self, group: JoinedGroup, members: Sequence[BroadcastMember]) -> bool:
        return (
            group.root.is_there
            and group.root.backend == self._backend
            and self._idle.is_fresh(group)
            and is_same_group(group.root.name, group.members, members)
        )

    def join(self) -> None:
        """Wait until the engines are in the group, after all readers have the terms."""
        assert self._group is not None
        if self._must_join:
            self._group.root.join()

    def parts(self, pairs: Pairs) -> Iterator[StreamedBucket]:
        """One bucket, in parts if it is large."""
        assert self._group is not None
        method = self._push.hashed_by_broadcast
        return broadcast_parts(pairs, self._group.root, self._flattener, method)

    def ended(self, is_whole: bool) -> None:
        """The push has ended. ``is_whole``: all engines got it and stay in the group."""
        group, self._group = self._group, None
        self._flattener.free()
        if group is None:
            return
        if is_whole:
            self._idle.put(group)
        else:
            group.root.close()


def broadcast_parts(
    pairs: Pairs, root: BroadcastRoot, flattener: Flattener, method: str
) -> Iterator[StreamedBucket]:
    """The parts of a bucket, made one by one: a request to the engines, and then a broadcast.

    Args:
        flattener: a part is valid until it takes the next one.
        method: of the fingerprints; empty takes none.
    """
    if not is_flattened(pairs):
        payload = {**describe_tensors(pairs.specs), "group_name": root.name}
        send = partial(root.send, pairs.tensors)
        yield StreamedBucket(payload, True, fingerprints_of(pairs, method), send)
        return
    device = pairs.tensors[0].device if root.backend == "nccl" else torch.device("cpu")
    parts = split_bucket(pairs, device)
    del pairs
    while parts:
        flat = flattener.flatten(parts.pop(0), device, method=method)
        payload = {**flat.description, "group_name": root.name, "load_format": FLATTENED_BUCKET}
        send = partial(root.send, [flat.tensor])
        yield StreamedBucket(payload, not parts, flat.fingerprints, send)
