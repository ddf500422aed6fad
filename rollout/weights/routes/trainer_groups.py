"""The trainer's end of broadcasts: the groups of its ranks, which are kept between pushes.

Engines receive from rank 0 of a group, so each rank of the trainer that sends, one for each host,
has a group of its own with all engines.  The stores of all groups run in the process of rank 0.

Always true: one push at a time uses a group; a group is kept only after a push that every engine
received; it is closed if it is not kept, if other engines join, or with the handle.  Ranks other
than 0 join and send in the caller's thread, when rank 0 says that the engines wait.

A new group costs a request to every engine, a connection for each pair of engines and, with NCCL,
seconds.  A kept group costs idle connections and, with NCCL, buffers on each GPU.  Firewalls drop
idle connections, some after 350 s, and then a push would fail at its deadline.  So a group that was
idle for some minutes is created again.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch.distributed import distributed_c10d

from engines.tensors.fingerprint import BYTES
from engines.tensors.flattened_bucket import FLATTENED_BUCKET
from rollout.config import WeightsConfig
from rollout.core.errors import ConfigError, WeightsUnavailable
from rollout.weights.routes.broadcast import BroadcastMember, can_be_kept, is_same_group
from rollout.weights.routes.route import RankEnd, StreamedBucket
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
NCCL_CUMEM = "NCCL_CUMEM_ENABLE"
# What a rank does in a broadcast of its own.
JOIN, SEND = "join", "send"


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


@dataclass(frozen=True, slots=True)
class _Group:
    """A group that all ranks have joined, and those in which other ranks of the trainer send.

    Attributes:
        members: the engines of all its ranks but the trainer's.
        num_senders: ranks of the trainer that send, each in a group of its own.
        idle_since: when its last push ended.
    """

    root: BroadcastRoot
    members: Sequence[BroadcastMember]
    num_senders: int = 1
    idle_since: float = 0.0

    @property
    def names(self) -> str:
        """Of all groups, with blanks between."""
        return " ".join(group_name(self.root.name, sender) for sender in range(self.num_senders))

    @property
    def takes_flat(self) -> bool:
        return all(member.takes_flat for member in self.members)


def group_name(first: str, sender: int) -> str:
    """Name of the group in which this one of the trainer's senders sends.

    Args:
        first: name of the first sender's group.
    """
    return f"{first}.{sender}" if sender else first


class KeptGroup:
    """The group of a server's last push, if it is kept. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.layouts = FlatLayoutCache()
        self._clock = clock
        self._lock = threading.Lock()
        self._group: _Group | None = None
        self._is_closed = False

    @property
    def name(self) -> str:
        """Name of the kept group; empty for none."""
        group = self._group
        return "" if group is None else group.root.name

    def take(self) -> _Group | None:
        """Take the group out; the caller owns it."""
        with self._lock:
            group, self._group = self._group, None
        return group

    def is_fresh(self, group: _Group) -> bool:
        """Whether it was used recently enough for its connections to work."""
        return self._clock() - group.idle_since <= _MOST_IDLE_S

    def keep(self, group: _Group) -> None:
        """Keep the group for the next push."""
        group = replace(group, idle_since=self._clock())
        with self._lock:
            over = group if self._is_closed else self._group
            if not self._is_closed:
                self._group = group
        if over is not None:  # another push kept it meanwhile
            over.root.close()

    def close(self) -> None:
        """Close the group and keep no other; engines notice that the trainer has left."""
        with self._lock:
            group, self._group, self._is_closed = self._group, None, True
        if group is not None:
            group.root.close()


@dataclass(frozen=True, slots=True)
class NcclTerms:
    """What NCCL needs to know of a server's engines.

    Attributes:
        why_not: why they cannot be in one NCCL group with the trainer; empty if they can.
        cumem: group -> ``NCCL_CUMEM_ENABLE`` of its engines; None if only their owner knows it.
    """

    why_not: str = ""
    cumem: Mapping[str, str | None] = field(default_factory=dict)


class BroadcastPush:
    """One push by broadcast.

    Args:
        is_on_cuda: whether the tensors are on a GPU.
        host: address of this machine for the engines.
        kept: keeps the group for the next push; None closes it.
        others: of each other rank of the trainer that sends, the name that ``KeptGroup`` would have
            for the groups that it has kept.
        fingerprints: the method of the fingerprints that are taken; empty takes none.

    Raises:
        ConfigError: NCCL would fail; nothing was sent.
    """

    def __init__(
        self,
        version: int,
        settings: WeightsConfig,
        host: str,
        kept: KeptGroup | None,
        nccl: NcclTerms | None = None,
        fingerprints: str = BYTES,
        *,
        is_on_cuda: bool,
        others: Sequence[str] = (),
    ) -> None:
        self._version = version
        self._settings = settings
        self._host = host
        self._kept = kept
        self._fingerprints = fingerprints
        self._flattener = Flattener(FlatLayoutCache() if kept is None else kept.layouts)
        self._others = others
        self._group: _Group | None = None
        # For the other senders, if they must join new groups.
        self.terms_of_others: Mapping[str, Any] = {}
        self._must_join = True
        self._backend = _backend(settings, nccl or NcclTerms(), is_on_cuda=is_on_cuda)

    def terms(self, members: Sequence[BroadcastMember]) -> Mapping[str, Any]:
        """Terms of the group for this push: the kept one if it fits, else a new one."""
        before = None if self._kept is None else self._kept.take()
        keeps = self._kept is not None and can_be_kept(members)
        if before is not None and self._can_go_on(before, members):
            self._group, self._must_join = before, False
            return {"group_name": before.names, "is_new": False, "keeps": keeps, "over": ""}
        if before is not None:
            before.root.close()
        timeout_s = self._settings.group_timeout_s
        root = BroadcastRoot(
            f"push-{self._version}-{secrets.token_hex(4)}",
            self._backend,
            host=self._host,
            join_timeout_s=timeout_s,
            send_timeout_s=timeout_s,
        )
        where = root.terms(sum(member.num_ranks for member in members))
        group = self._group = _Group(root, tuple(members), 1 + len(self._others))
        terms = {**where, "backend": self._backend, "keeps": keeps}
        if self._others:
            cumem = os.environ.get(NCCL_CUMEM)
            more = {"first": root.name, "takes_flat": group.takes_flat, "cumem": cumem}
            self.terms_of_others = {**terms, **more}
        over = "" if before is None else before.names
        return {**terms, "group_name": group.names, "is_new": True, "over": over}

    def _can_go_on(self, group: _Group, members: Sequence[BroadcastMember]) -> bool:
        assert self._kept is not None
        return (
            group.root.is_there
            and group.root.backend == self._backend
            and group.num_senders == 1 + len(self._others)
            and all(name == group.root.name for name in self._others)
            and self._kept.is_fresh(group)
            and is_same_group(group.names, group.members, members)
        )

    def join(self) -> None:
        """Wait until the engines are in the group, after all readers have the terms."""
        assert self._group is not None
        if self._must_join:
            self._group.root.join()

    def parts(self, pairs: Pairs, is_last: bool) -> Iterator[StreamedBucket]:
        """One bucket, in parts if it is large; ``is_last`` is that of its last part."""
        assert self._group is not None
        root = self._group.root
        parts = broadcast_parts(
            pairs,
            root,
            repeat(self._flattener),
            takes_flat=self._group.takes_flat,
            method=self._fingerprints,
        )
        del pairs
        for part in parts:
            send = partial(root.send, part.tensors)
            yield StreamedBucket(part.payload, is_last and part.is_last, part.fingerprints, send)
            del part, send

    def ended(self, is_kept: bool) -> None:
        """The push has ended. ``is_kept``: all engines got it and stay in the group."""
        group, self._group = self._group, None
        self._flattener.free()
        if group is None:
            return
        if is_kept and self._kept is not None:
            self._kept.keep(group)
        else:
            group.root.close()


@dataclass(frozen=True, slots=True)
class BroadcastPart:
    """What goes to the engines in one request, and one broadcast or several.

    Attributes:
        payload: the arguments of the request.
    """

    payload: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    tensors: Sequence[torch.Tensor]
    is_last: bool = True


def broadcast_parts(
    pairs: Pairs,
    root: BroadcastRoot,
    flatteners: Iterable[Flattener],
    *,
    takes_flat: bool,
    method: str,
) -> Iterator[BroadcastPart]:
    """The parts of a bucket, made one by one; ``is_last`` of the last one of the bucket.

    Args:
        flatteners: one for each part.  A part is valid until its flattener takes another one.
        takes_flat: the engines accept many tensors in one broadcast.
        method: of the fingerprints; empty takes none.
    """
    if not (takes_flat and is_worth_flattening(pairs)):
        payload = {**describe_tensors(pairs.specs), "group_name": root.name}
        yield BroadcastPart(payload, fingerprints_of(pairs, method), pairs.tensors)
        return
    device = pairs.tensors[0].device if root.backend == "nccl" else torch.device("cpu")
    parts = split_bucket(pairs, device)
    del pairs
    for flattener in flatteners:
        flat = flattener.flatten(parts.pop(0), device, method=method)
        payload = {**flat.description, "group_name": root.name, "load_format": FLATTENED_BUCKET}
        yield BroadcastPart(payload, flat.fingerprints, [flat.tensor], not parts)
        if not parts:
            return


def _backend(settings: WeightsConfig, nccl: NcclTerms, *, is_on_cuda: bool) -> str:
    backend = choose_backend(settings.backend, nccl.why_not, is_on_cuda=is_on_cuda)
    if backend != "nccl":
        if is_on_cuda and settings.backend == "auto":
            logger.warning(
                "weights.transport = distributed sends by gloo, through host memory: %s; "
                "cuda_ipc or shared_memory is faster",
                nccl.why_not,
            )
        return backend
    if why := why_cumem_differs(os.environ.get(NCCL_CUMEM), nccl.cumem):
        raise ConfigError(why, setting="weights.backend", value=settings.backend)
    return backend


def choose_backend(wanted: str, why_no_nccl: str, *, is_on_cuda: bool) -> str:
    """The backend of a broadcast: ``auto`` is NCCL for tensors on a GPU that NCCL can send."""
    if wanted != "auto":
        return wanted
    return "nccl" if is_on_cuda and not why_no_nccl else "gloo"


def why_cumem_differs(own: str | None, engines: Mapping[str, str | None]) -> str:
    """Why a broadcast by NCCL would fail between this process and the engines; empty if not.

    NCCL reads the variable once, and all ranks of a group must have the same value.  SGLang sets
    it; NCCL's own default is another one.

    Args:
        own: the value in this process; None if it is not set.
        engines: group -> the value of its engines; None if only their owner knows it.
    """
    for group, value in engines.items():
        if own is None or value not in (None, own):
            return (
                f"{NCCL_CUMEM} is {own or 'not set'} in the trainer, and the engines of group "
                f"{group} have {value or 'the value of their owner; SGLang takes 0'}: set "
                f"{NCCL_CUMEM}={value or 0} in the environment of the trainer before its process "
                "starts, or engine.env of the group to the trainer's value"
            )
    return ""


@dataclass(slots=True)
class SenderGroup:
    """The group of this rank, from push to push.

    Attributes:
        first: name of the first sender's group; empty if there is none.
        takes_flat: its engines accept many tensors in one broadcast.
        keeps: whether it can be used in the next push.
        layouts: of flat buckets, from earlier pushes.
    """

    first: str = ""
    root: BroadcastRoot | None = None
    takes_flat: bool = False
    keeps: bool = False
    layouts: FlatLayoutCache = field(default_factory=FlatLayoutCache)

    @property
    def name(self) -> str:
        """``first``, if the group still is there: a trainer's ``destroy_process_group()`` ends all
        groups."""
        return self.first if self.root is not None and self.root.is_there else ""

    def close(self) -> None:
        """Leave the group."""
        root, self.root, self.first = self.root, None, ""
        if root is not None:
            root.close()


class BroadcastSender:
    """A rank other than 0 that broadcasts one bucket of ``num_senders``.

    Args:
        group: of this rank; joined again if rank 0 says so.
        number: of this rank among the senders; that of rank 0 is 0.
        timeout_s: for one bucket, and for all engines to join.
        fingerprints: the method of the fingerprints that are taken; empty takes none.
    """

    def __init__(
        self,
        group: SenderGroup,
        *,
        rank: int,
        number: int,
        num_senders: int,
        timeout_s: float,
        fingerprints: str,
    ) -> None:
        self._group = group
        self._rank = rank
        self._number = number
        self._num_senders = num_senders
        self._timeout_s = timeout_s
        self._fingerprints = fingerprints
        self._flatteners: list[Flattener] = []
        self._parts: list[BroadcastPart] = []

    @classmethod
    def of(cls, end: RankEnd) -> BroadcastSender:
        """The sender of a rank other than 0."""
        return cls(
            end.sender_group,
            rank=end.rank,
            number=end.terms.senders.index(end.rank),
            num_senders=len(end.terms.senders),
            timeout_s=min(end.config.weights.group_timeout_s, end.timeout_s),
            fingerprints=end.terms.fingerprints if end.terms.hashing_host is None else "",
        )

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any] | None:
        """The requests that the engines get for this rank's bucket; its tensors stay until they
        are sent."""
        if index % self._num_senders != self._number:
            return None
        root = self._group.root
        if root is None:
            raise WeightsUnavailable("it has no group with the engines")
        self._parts = list(
            broadcast_parts(
                pairs,
                root,
                self._each_its_own(),
                takes_flat=self._group.takes_flat,
                method=self._fingerprints,
            )
        )
        found = dict(ChainMap(*(dict(part.fingerprints) for part in self._parts)))
        return {"parts": [part.payload for part in self._parts], "fingerprints": found}

    def carry_out(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Join the engines, or send them a part of the bucket, if the task is this rank's."""
        try:
            if task["do"] == JOIN:
                self._join(task["terms"])
            elif task["sender"] == self._rank:
                assert self._group.root is not None
                self._group.root.send(self._parts[task["part"]].tensors)
                if task["part"] == len(self._parts) - 1:
                    self._parts = []
        except WeightsUnavailable as error:
            # The engines' end of it is known to the server, which ends the push.
            return {"why_not": f"rank {self._rank}: {error}"}
        return {}

    def keep(self) -> None:
        """After a push that has succeeded."""
        if self._group.keeps:
            self._group = SenderGroup()  # ``close`` leaves the kept one alone

    def close(self) -> None:
        """End a push; without ``keep`` the group is left."""
        self._parts, self._flatteners = [], []
        self._group.close()

    def _join(self, terms: Mapping[str, Any]) -> None:
        self._group.close()
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
        self._group.first, self._group.root = terms["first"], root
        self._group.takes_flat, self._group.keeps = terms["takes_flat"], terms["keeps"]

    def _each_its_own(self) -> Iterator[Flattener]:
        """The parts of a bucket are in memory together."""
        yield from self._flatteners
        while True:
            self._flatteners.append(Flattener(self._group.layouts))
            yield self._flatteners[-1]
