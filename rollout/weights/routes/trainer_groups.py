"""The trainer's end of broadcasts: the groups of its ranks, which stay from push to push.

Engines receive from rank 0 of a group, so each rank of the trainer that sends, one for each host,
has a group of its own with all engines.  The stores of all groups run in the process of rank 0.

Always true: one push at a time uses a group; a group stays only after a push that every engine
received; it is closed if it does not stay, if other engines join, or with the handle.  Ranks other
than 0 join and send in the caller's thread, when rank 0 says that the engines wait.

A new group costs a request to every engine, a connection for each pair of engines and, with NCCL,
seconds.  An idle group costs connections and, with NCCL, buffers on each GPU.  Firewalls drop idle
connections, some after 350 s, and then a push would fail at its deadline.  So a group that was
idle for some minutes is created again.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch.distributed import distributed_c10d

from engines.protocol.spec import NCCL_CUMEM
from engines.tensors.collective.new_group import new_group
from engines.tensors.flattened_bucket import FLATTENED_BUCKET
from rollout.config import ServerConfig
from rollout.core.errors import WeightsUnavailable
from rollout.weights.routes.nccl import backend_of
from rollout.weights.routes.route import BroadcastMember, BroadcastTask, PushTerms, StreamedBucket
from rollout.weights.tensors.bucket_bytes import (
    FlatLayoutCache,
    Flattener,
    describe_tensors,
    fingerprints_of,
    is_worth_flattening,
    split_bucket,
)
from rollout.weights.tensors.sources import Pairs

logger = logging.getLogger(__name__)

_MOST_IDLE_S = 240.0


class BroadcastRoot:
    """Rank 0 of one group: opens the TCP store, joins, sends.

    Always true: the store runs in this process, or in that of the trainer's rank 0, as long as the
    group exists.  It is closed at the deadline, which ends the wait of engines for others that did
    not join.  A late broadcast ends the group, which ends the wait of its receivers.

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
class SenderGroup:
    """The group in which one rank of the trainer sends, after all engines have joined.

    Only rank 0 knows its members, and decides whether the next push uses it.

    Attributes:
        root: this rank's end.
        first: name of the first sender's group: that of rank 0.
        stays: it can be used in the next push.
        members: the engines, on rank 0.
        num_senders: ranks of the trainer that send, each in a group of its own.
        idle_since: when its last push ended.
    """

    root: BroadcastRoot
    first: str
    stays: bool
    members: Sequence[BroadcastMember] = ()
    num_senders: int = 1
    idle_since: float = 0.0

    @property
    def names(self) -> str:
        """Of the groups of all senders, with blanks between."""
        return " ".join(group_name(self.first, sender) for sender in range(self.num_senders))


def group_name(first: str, sender: int) -> str:
    """Name of the group in which this one of the trainer's senders sends.

    Args:
        first: name of the first sender's group.
    """
    return f"{first}.{sender}" if sender else first


def is_reusable(members: Sequence[BroadcastMember]) -> bool:
    """Whether the next push can recognise a group of these engines."""
    return bool(members) and all(member.process for member in members)


def is_same_group(
    group_name: str, before: Sequence[BroadcastMember], now: Sequence[BroadcastMember]
) -> bool:
    """Whether the group that ``before`` joined can send to the engines in ``now``."""
    same = {member.rank_of for member in before} == {member.rank_of for member in now}
    return same and is_reusable(now) and all(member.groups == group_name for member in now)


class IdleGroup:
    """The group of a trainer's last push, for the next one, by whichever call. Thread-safe.

    Attributes:
        layouts: of flat buckets, from earlier pushes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.layouts = FlatLayoutCache()
        self._clock = clock
        self._lock = threading.Lock()
        self._group: SenderGroup | None = None
        self._is_closed = False

    @property
    def name(self) -> str:
        """Name of the first sender's group; empty for none, also if the trainer has ended all its
        groups (``destroy_process_group()``)."""
        group = self._group
        return group.first if group is not None and group.root.is_there else ""

    def take(self) -> SenderGroup | None:
        """Take the group out; the caller owns it."""
        with self._lock:
            group, self._group = self._group, None
        return group

    def is_fresh(self, group: SenderGroup) -> bool:
        """Whether it was used recently enough for its connections to work."""
        return self._clock() - group.idle_since <= _MOST_IDLE_S

    def put(self, group: SenderGroup) -> None:
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
        others: what ``IdleGroup.name`` is on each other rank of the trainer that sends; None in a
            push of this process alone, which leaves the groups of the others as they are.
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
        others: Sequence[str] | None = None,
        is_on_cuda: bool = False,
    ) -> None:
        self._push = terms
        self._timeout_s = config.weights.group_timeout_s
        self._host = host
        self._idle = idle
        self._flattener = Flattener(idle.layouts)
        self._others = others
        self._group: SenderGroup | None = None
        # For the other senders, if they must join new groups.
        self.terms_of_others: Mapping[str, Any] = {}
        self._must_join = True
        self._backend = backend_of(config, is_on_cuda=is_on_cuda)

    def terms(self, members: Sequence[BroadcastMember]) -> Mapping[str, Any]:
        """Terms of the group for this push: the idle one if it fits, else a new one."""
        self._group = before = self._idle.take()  # ``ended`` closes it, if this fails
        stays = is_reusable(members)
        if before is not None and self._fits(before, members):
            self._must_join = False
            return {"group_name": before.names, "is_new": False, "keeps": stays, "over": ""}
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
        num_senders = 1 + len(self._others or ())
        group = SenderGroup(root, root.name, stays, tuple(members), num_senders)
        self._group = group
        terms = {**where, "backend": self._backend, "keeps": stays}
        if self._others:
            cumem = os.environ.get(NCCL_CUMEM)
            self.terms_of_others = {**terms, "first": root.name, "cumem": cumem}
        over = "" if before is None else before.names
        return {**terms, "group_name": group.names, "is_new": True, "over": over}

    def _fits(self, group: SenderGroup, members: Sequence[BroadcastMember]) -> bool:
        others = self._others
        return (
            group.root.is_there
            and group.root.backend == self._backend
            and (others is None or [group.first] * (group.num_senders - 1) == list(others))
            and self._idle.is_fresh(group)
            and is_same_group(group.names, group.members, members)
        )

    def join(self) -> None:
        """Wait until the engines are in the group, after all readers have the terms."""
        assert self._group is not None
        if self._must_join:
            self._group.root.join()

    def parts(self, pairs: Pairs) -> Iterator[StreamedBucket]:
        """One bucket, in parts if it is large."""
        assert self._group is not None
        return broadcast_parts(
            pairs, self._group, repeat(self._flattener), self._push.hashed_by_senders
        )

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


class BroadcastSender:
    """A rank other than 0 that broadcasts one bucket of as many as there are senders.

    Args:
        rank: its number among the senders is not 0.
        timeout_s: for the engines to join, and for one bucket.
    """

    def __init__(self, rank: int, terms: PushTerms, idle: IdleGroup, timeout_s: float) -> None:
        self._rank = rank
        self._push = terms
        self._number = terms.senders.index(rank)
        self._timeout_s = timeout_s
        self._idle = idle
        self._group = idle.take()
        self._flatteners: list[Flattener] = []
        self._parts: list[StreamedBucket] = []
        if self._group is not None and self._group.first != terms.group:
            self._leave()  # rank 0 has left it, or will

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any] | None:
        """The requests that the engines get for this rank's bucket; its tensors stay until they
        are sent."""
        if index % len(self._push.senders) != self._number:
            return None
        if self._group is None:
            raise WeightsUnavailable("it has no group with the engines")
        flatteners, method = self._each_its_own(), self._push.hashed_by_senders
        self._parts = list(broadcast_parts(pairs, self._group, flatteners, method))
        fingerprints: dict[str, str] = {}
        for part in self._parts:
            fingerprints |= part.fingerprints
        return {"parts": [part.payload for part in self._parts], "fingerprints": fingerprints}

    def carry_out(self, task: BroadcastTask) -> str:
        """Join the engines, or send them a part of the bucket, if the task is this rank's.  Returns
        why it could not; empty if it could."""
        try:
            if task.terms is not None:
                self._join(task.terms)
            elif task.sender == self._rank:
                send = self._parts[task.part].then
                assert send is not None
                send()
                if task.part == len(self._parts) - 1:
                    self._parts = []
        except WeightsUnavailable as error:
            # The engines' end of it is known to the server, which ends the push.
            return f"rank {self._rank}: {error}"
        return ""

    def stay(self) -> None:
        """After a push that has succeeded."""
        if self._group is not None and self._group.stays:
            self._idle.put(self._group)
            self._group = None

    def close(self) -> None:
        """End a push; without ``stay`` the group is left."""
        self._parts, self._flatteners = [], []
        self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.root.close()

    def _join(self, terms: Mapping[str, Any]) -> None:
        self._leave()
        own = os.environ.get(NCCL_CUMEM)
        if terms["backend"] == "nccl" and own != terms["cumem"]:
            raise WeightsUnavailable(f"{NCCL_CUMEM} is {own}, and {terms['cumem']} on rank 0")
        root = BroadcastRoot(
            group_name(terms["first"], self._number),
            terms["backend"],
            join_timeout_s=self._timeout_s,
            send_timeout_s=self._timeout_s,
        )
        root.join_at(terms)
        self._group = SenderGroup(root, terms["first"], terms["keeps"])

    def _each_its_own(self) -> Iterator[Flattener]:
        """The parts of a bucket are in memory together."""
        yield from self._flatteners
        while True:
            self._flatteners.append(Flattener(self._idle.layouts))
            yield self._flatteners[-1]


def broadcast_parts(
    pairs: Pairs, group: SenderGroup, flatteners: Iterable[Flattener], method: str
) -> Iterator[StreamedBucket]:
    """The parts of a bucket, made one by one: a request to the engines, and then a broadcast.

    Args:
        flatteners: one for each part.  A part is valid until its flattener takes another one.
        method: of the fingerprints; empty takes none.
    """
    root = group.root
    if not is_worth_flattening(pairs):
        payload = {**describe_tensors(pairs.specs), "group_name": root.name}
        send = partial(root.send, pairs.tensors)
        yield StreamedBucket(payload, True, fingerprints_of(pairs, method), send)
        return
    device = pairs.tensors[0].device if root.backend == "nccl" else torch.device("cpu")
    parts = split_bucket(pairs, device)
    del pairs
    for flattener in flatteners:
        flat = flattener.flatten(parts.pop(0), device, method=method)
        payload = {**flat.description, "group_name": root.name, "load_format": FLATTENED_BUCKET}
        send = partial(root.send, [flat.tensor])
        yield StreamedBucket(payload, not parts, flat.fingerprints, send)
        if not parts:
            return
